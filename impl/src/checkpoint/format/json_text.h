// JSON out of files that anybody may have written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace shardproof::checkpoint {

// Throws Error naming `name` when the text is no JSON, nests deeper than checkpoints need, or names a key twice in one object.
nlohmann::json parse_json(std::string_view text, const std::string& name);

}  // namespace shardproof::checkpoint
