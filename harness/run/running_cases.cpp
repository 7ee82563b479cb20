#include "harness/run/running_cases.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace harness {
namespace running {

constexpr size_t kTextMax = 16 << 10, kStackBytes = 64 << 10;

// Entries are used again and never freed, so that a signal handler can read any of them at any time.
struct Entry {
  Entry* next = nullptr;
  std::atomic<bool> taken{true};
  std::atomic<uint64_t> number{0};  // a later case has a larger one; 0: no case
  int thread = 0;
  char text[kTextMax];
  char stack[kStackBytes];
};

namespace {

std::atomic<Entry*> entries{nullptr};
std::atomic<uint64_t> numbers{0};

Entry* take() {
  for (Entry* entry = entries.load(); entry; entry = entry->next)
    if (bool free = false; entry->taken.compare_exchange_strong(free, true)) return entry;
  Entry* const entry = new Entry;
  entry->next = entries.load();
  while (!entries.compare_exchange_weak(entry->next, entry)) continue;
  return entry;
}

// The innermost case of a thread; null where it has none.
const Entry* entry_of(int thread) {
  const Entry* found = nullptr;
  uint64_t latest = 0;
  for (const Entry* entry = entries.load(); entry; entry = entry->next)
    if (const uint64_t number = entry->number; number > latest && entry->thread == thread) found = entry, latest = number;
  return found;
}

bool was_told(const Entry* until, const char* text) {
  for (const Entry* entry = entries.load(); entry != until; entry = entry->next)
    if (entry->number != 0 && std::strcmp(entry->text, text) == 0) return true;
  return false;
}

}  // namespace
}  // namespace running

using running::Entry;

RunningCase::RunningCase(const std::string& text) : entry_(running::take()) {
  // A case that was cut would be no case, so a longer one is not told. Those that are drawn have less than a tenth of that.
  const bool fits = text.size() < running::kTextMax;
  entry_->thread = ::gettid();
  std::memcpy(entry_->text, text.c_str(), fits ? text.size() + 1 : 0);
  if (fits) entry_->number = ++running::numbers;
  const stack_t own{.ss_sp = entry_->stack, .ss_flags = 0, .ss_size = running::kStackBytes};
  ::sigaltstack(&own, &stack_before_);
}

RunningCase::~RunningCase() {
  ::sigaltstack(&stack_before_, nullptr);
  entry_->number = 0;
  entry_->taken = false;
}

const char* running_case_of(int thread) {
  const Entry* const own = running::entry_of(thread);
  return own ? own->text : "";
}

void each_running_case(int thread, void (*tell)(const char* text, void* with), void* with) {
  const char* const first = running_case_of(thread);
  if (*first) tell(first, with);
  for (const Entry* entry = running::entries.load(); entry; entry = entry->next)
    if (entry->number != 0 && std::strcmp(entry->text, first) != 0 && !running::was_told(entry, entry->text))
      tell(entry->text, with);
}

}  // namespace harness
