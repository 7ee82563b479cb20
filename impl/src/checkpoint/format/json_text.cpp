#include "checkpoint/format/json_text.h"

#include <set>

#include "checkpoint/format/lfs_pointer.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {

nlohmann::json parse_json(std::string_view text, const std::string& name) {
  using nlohmann::json;
  require_no_lfs_pointer(text, name);
  constexpr int kDepthMax = 32;
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    SHARD_REQUIRE(depth <= kDepthMax, "json", "{}: nests too deeply", name);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key)
      SHARD_REQUIRE(keys.back().insert(value.get<std::string>()).second, "json", "{}: names '{}' twice", name,
                    value.get<std::string>());
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    throw Error(message("[json] {}: {}", name, error.what()));
  }
}

}  // namespace shardproof::checkpoint
