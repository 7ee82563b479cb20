#include "harness/commands/json_lines.h"

#include "shardproof/base/check.h"

namespace harness {

JsonLines::JsonLines(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  file_.open(path_);
  SHARD_REQUIRE(file_.good(), "json", "cannot write {}; give --json a path in a folder that exists", path_);
}

void JsonLines::write(const nlohmann::json& object) {
  if (path_.empty()) return;
  file_ << object.dump() << std::endl;
  SHARD_REQUIRE(file_.good(), "json", "writing {} failed; is the disk full?", path_);
}

}  // namespace harness
