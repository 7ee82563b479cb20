#include "comm/mpi/mpi_operation.h"

#include <fmt/format.h>

#include <functional>

namespace shardproof::mpi {

Operation::Operation(std::shared_ptr<Group> group, Call call)
    : process::Operation(group->flight(), std::move(call)), group_(std::move(group)) {}

Header Operation::header(Kind kind) const {
  Header made{.kind = kind,
          .op = call.op,
          .reduce = call.reduce,
          .dtype = static_cast<int32_t>(dtype(call)),
          .sequence = sequence,
          .numel = numel(call),
          .root = call.op == Op::broadcast ? call.peer : -1,
          .tag = call.tag};
  made.purpose_hash = std::hash<std::string>()(label);
  label.copy(made.purpose.data(), made.purpose.size() - 1);
  return made;
}

void Operation::fail(std::string error, bool relayed) {
  if (!error_.empty()) return;
  error_ = std::move(error);
  relayed_ = relayed;
}

void Operation::fail_abandoned(int64_t peer, const Message& last) {
  fail(fmt::format("rank {} failed while this rank was in {}: {}", group_->world_ranks()[static_cast<size_t>(peer)], title(),
                   std::string_view(reinterpret_cast<const char*>(last.body.data()), last.body.size())),
       true);
}

}  // namespace shardproof::mpi
