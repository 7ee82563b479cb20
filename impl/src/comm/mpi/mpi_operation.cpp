#include "comm/mpi/mpi_operation.h"

#include <fmt/format.h>

namespace shardproof::mpi {

std::string title_of(const Call& call, int64_t sequence, const Group& group, std::string_view label) {
  return fmt::format("{}, call {} on '{}'{}", describe(call), sequence, group.name(),
                     label.empty() ? "" : fmt::format(", for {}", label));
}

Operation::Operation(std::shared_ptr<Group> group, Call call)
    : group_(std::move(group)), call_(std::move(call)), label_(CallLabel::current()) {}

Header Operation::header(Kind kind) const {
  return {.kind = kind,
          .op = call_.op,
          .reduce = call_.reduce,
          .dtype = static_cast<int32_t>(dtype(call_)),
          .sequence = sequence_,
          .numel = numel(call_),
          .root = call_.op == Op::broadcast ? call_.peer : -1,
          .tag = call_.tag};
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
