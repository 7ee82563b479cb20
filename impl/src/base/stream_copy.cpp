#include "internal/base/stream_copy.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#  include <emmintrin.h>
#endif

namespace shardproof {

void stream_copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;  // memory of an empty tensor may be null, which memcpy must not see
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
#if defined(__x86_64__)
  const size_t head = std::min(bytes, static_cast<size_t>(-reinterpret_cast<uintptr_t>(out) & 63));
  std::memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= 64; out += 64, in += 64, bytes -= 64)
    for (int i = 0; i < 64; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
  _mm_sfence();
#endif
  if (bytes > 0) std::memcpy(out, in, bytes);
}

void prefer_large_pages(void* memory, size_t bytes) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace shardproof
