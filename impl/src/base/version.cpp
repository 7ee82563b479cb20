#include "shardproof/version.h"

namespace shardproof {

const char* library_version() {
  return SHARDPROOF_VERSION;
}

}  // namespace shardproof
