// The parser of reproduction lines under libFuzzer: any text is a case or an Error, and a case prints as what parses back.
#include <cstdlib>
#include <string>

#include "harness/case/case.h"
#include "properties/kit/shown.h"
#include "shardproof/base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  try {
    const harness::Case parsed = harness::Case::parse({reinterpret_cast<const char*>(data), bytes});
    const std::string text = parsed.str();
    if (harness::Case::parse(text).str() != text) std::abort();
  } catch (const shardproof::Error& error) {
    if (!can_be_shown(error.what(), /*lines=*/true)) std::abort();
  }
  return 0;
}
