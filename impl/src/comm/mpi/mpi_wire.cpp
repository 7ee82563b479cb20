#include "comm/mpi/mpi_wire.h"

#include <fmt/format.h>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"

namespace shardproof::mpi {
namespace {
// Of MPI's tags, of which every implementation here has 2^31: half for collectives in two phases, half for sends.
constexpr int64_t kTags = int64_t{1} << 28;
}  // namespace

int data_tag(int64_t sequence, int phase) {
  return static_cast<int>(1 + 2 * (sequence % kTags) + phase);
}
int send_data_tag(int64_t sequence) {
  return static_cast<int>(1 + 2 * kTags + sequence % kTags);
}

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw BrokenInvariant(fmt::format("[mpi] {} failed: {}", what, std::string(text, static_cast<size_t>(length))));
}

std::string describe(const Header& header) {
  if (header.op == Op::barrier || header.op == Op::split) return fmt::format("{}()", to_string(header.op));
  std::string text = fmt::format("{}(", to_string(header.op));
  if (header.op == Op::all_reduce || header.op == Op::reduce_scatter)
    text +=
        fmt::format("{}{}, ", to_string(header.reduce), header.factor == 1 ? "" : fmt::format(" then times {}", header.factor));
  text += dtype_name(static_cast<at::ScalarType>(header.dtype));
  if (header.op != Op::all_to_all) text += fmt::format(" x {}", header.numel);
  if (header.op == Op::broadcast) text += fmt::format(", root {}", header.root);
  return text + ")";
}

}  // namespace shardproof::mpi
