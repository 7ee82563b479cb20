#include "comm/process/engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "internal/base/call_label.h"
#include "internal/comm/flight_call.h"

namespace shardproof::process {

std::string title_of(const Call& call, int64_t sequence, const std::string& group, std::string_view label) {
  return fmt::format("{}, call {} on '{}'{}", describe(call), sequence, group,
                     label.empty() ? "" : fmt::format(", for {}", label));
}

Operation::Operation(std::shared_ptr<const FlightGroup> group, Call call)
    : flight(std::move(group)), call(std::move(call)), label(CallLabel::purpose()) {}

void Calls::begin(std::shared_ptr<Operation> operation) {
  operation->record = record_.add(flight_call(operation->call, operation->flight, operation->sequence, operation->label));
  const std::lock_guard lock(mutex_);
  open_.push_back(std::move(operation));
}

void Calls::end(Operation& operation) {
  operation.waited = true;
  const std::lock_guard lock(mutex_);
  open_.remove_if([&](const auto& each) { return each.get() == &operation; });
}

void Calls::forget() {
  const std::lock_guard lock(mutex_);
  open_.clear();
}

std::vector<std::string> Calls::open() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> titles;
  for (const auto& operation : open_) titles.push_back(operation->title());
  return titles;
}

std::string Calls::write(const std::string& directory, const std::string& why) const {
  return directory.empty() ? "" : record_.write(directory, why);
}

void Runner::run(const Body& body, int64_t ranks) {
  require_ranks(part(), ranks, size());
  begin();
  const std::exception_ptr thrown = thrown_by([&] {
    const std::shared_ptr<Comm> comm = enter(ranks);
    if (comm) body(comm);
    leave();
    require_all_waited(part(), calls().open());
    require_nothing_left();
  });
  const Ending mine = ending_of(thrown, calls().last());
  if (mine.failed) abandon(mine.text);
  const std::vector<Ending> endings = exchange(mine);
  const bool failed = std::any_of(endings.begin(), endings.end(), [](const Ending& each) { return each.failed != 0; });
  close(failed);
  if (!failed) return;
  const size_t first = culprit(endings);
  rethrow(endings[first], first, endings.size());
}

}  // namespace shardproof::process
