// In the place of NCCL where none was found.
#include "shardproof/base/check.h"
#include "shardproof/comm/nccl/nccl_api.h"

namespace shardproof {

bool nccl_available() {
  return false;
}
int64_t nccl_devices() {
  return 0;
}
int64_t nccl_version() {
  return 0;
}
int64_t nccl_compute_capability(int64_t) {
  return 0;
}
std::string nccl_device_id(int64_t) {
  return "";
}
std::shared_ptr<NcclApi> nccl_api(int64_t) {
  throw Error(
      "[nccl] this build has no NCCL: CMake found no headers of NCCL and the CUDA runtime beside PyTorch (docs/nccl.md). "
      "Install them, run cmake again and rebuild, or use --backend mpi or threads");
}

}  // namespace shardproof
