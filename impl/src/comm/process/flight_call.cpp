#include "internal/comm/flight_call.h"

#include <ATen/core/Tensor.h>

#include "shardproof/base/dtypes.h"

namespace shardproof {

FlightCall flight_call(const Call& call, std::shared_ptr<const FlightGroup> group, int64_t sequence, std::string label) {
  const bool sums = call.op == Op::all_reduce || call.op == Op::reduce_scatter;
  const bool has_data = call.op != Op::barrier && call.op != Op::split;
  FlightCall record{.group = std::move(group), .sequence = sequence, .op = to_string(call.op)};
  if (sums) record.reduce = to_string(call.reduce);
  if (has_data) record.dtype = dtype_name(dtype(call)), record.numel = numel(call);
  record.peer = call.peer;
  record.bytes = static_cast<int64_t>((call.input.defined() ? call.input.nbytes() : 0) +
                                      (call.output.defined() ? call.output.nbytes() : 0));
  record.label = std::move(label);
  return record;
}

}  // namespace shardproof
