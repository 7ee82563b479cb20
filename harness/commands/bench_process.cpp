#include "harness/commands/bench_process.h"

#include <algorithm>

#include "harness/commands/process.h"
#include "shardproof/base/check.h"

namespace harness {

using nlohmann::json;

json run_process(const std::string& command, const std::string& contestant) {
  const auto [output, status] = output_of(command);
  const size_t begin = output.find('{');
  SHARD_REQUIRE(status == 0 && begin != std::string::npos, "bench", "{} did not finish (status {}). Run it alone: {}",
                contestant, status, command);
  return json::parse(output.substr(begin, output.find('\n', begin) - begin));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

json model_spec(const bench::Size& size) {
  return {{"layers", size.layers}, {"hidden", size.hidden}, {"heads", size.heads},    {"vocab", size.vocab},
          {"seq", size.seq},       {"batch", size.batch},   {"experts", size.experts}};
}

}  // namespace harness
