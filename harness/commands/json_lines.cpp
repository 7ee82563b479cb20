#include "harness/commands/json_lines.h"

#include <filesystem>

#include "shardproof/base/check.h"

namespace harness {

namespace {

nlohmann::json in_utf8(nlohmann::json value) {
  if (value.is_string() && !shardproof::is_utf8(value.get_ref<const std::string&>()))
    return shardproof::escaped(value.get_ref<const std::string&>());
  if (value.is_structured())
    for (nlohmann::json& item : value) item = in_utf8(std::move(item));
  return value;
}

}  // namespace

std::string in_ascii(const nlohmann::json& object) { return in_utf8(object).dump(-1, ' ', /*ensure_ascii=*/true); }

void read_json_lines(const std::string& path, const std::string& option, const std::string& writer,
                     const std::function<void(const nlohmann::json& line)>& visit) {
  std::ifstream file(path);
  SHARD_REQUIRE(file.good(), "verify", "{}: cannot read {}; it is a file that {} has written", option, path, writer);
  int64_t number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    try {
      visit(nlohmann::json::parse(text));
    } catch (const nlohmann::json::exception& error) {
      throw shardproof::Error(
          fmt::format("[verify] {}: {}, line {}: no line of {}: {}", option, path, number, writer, error.what()));
    }
  }
}

JsonLines::JsonLines(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  // Emptied, and then appended to: a crash adds lines of its own to what is there (crash_report.h).
  std::error_code none;
  if (std::filesystem::is_regular_file(path_, none)) std::filesystem::resize_file(path_, 0, none);
  file_.open(path_, std::ios::app);
  SHARD_REQUIRE(file_.good(), "json", "cannot write {}; give --json a path in a folder that exists", path_);
}

void JsonLines::write(const nlohmann::json& object) {
  if (path_.empty()) return;
  file_ << in_ascii(object) << std::endl;
  SHARD_REQUIRE(file_.good(), "json", "writing {} failed; is the disk full?", path_);
}

}  // namespace harness
