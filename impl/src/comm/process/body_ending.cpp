#include "comm/process/body_ending.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/said_rank.h"
#include "shardproof/base/failed_check.h"
#include "shardproof/comm/process/process_world.h"

namespace shardproof {

std::exception_ptr thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const WorldLostError&) {
    throw;
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void require_all_waited(const char* part, const std::vector<std::string>& open) {
  if (open.empty()) return;
  throw Error(fmt::format("[{}] the body returned but never waited for {}; call Work::wait on every Work", part,
                          fmt::join(open, "; ")));
}

void require_ranks(const char* part, int64_t ranks, int64_t size) {
  if (ranks >= 0 && ranks <= size) return;
  throw Error(fmt::format("[{}] a body for {} ranks cannot run on {} processes", part, ranks, size));
}

Ending ending_of(const std::exception_ptr& thrown, const std::string& last_call) {
  Ending ending;
  if (!thrown) return ending;
  ending.failed = 1;
  ending.kind = Ending::error;
  std::string text = "an exception without a message", origin;
  const auto from = [&](const auto& error) { text = error.what(), origin = error.origin().str(); };
  try {
    std::rethrow_exception(thrown);
  } catch (const RelayedError& e) {
    ending.relayed = 1;
    from(e);
  } catch (const NonFiniteError& e) {
    ending.kind = Ending::non_finite;
    from(e);
  } catch (const FailedCheck& e) {
    ending.kind = Ending::failed_check;
    from(e);
  } catch (const BrokenInvariant& e) {
    ending.kind = Ending::invariant;
    from(e);
  } catch (const Error& e) {
    from(e);
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
  }
  if (ending.relayed == 0 && !last_call.empty()) text += fmt::format(" (the last call of this rank was {})", last_call);
  text.copy(ending.text, sizeof ending.text - 1);
  origin.copy(ending.origin, sizeof ending.origin - 1);
  return ending;
}

[[noreturn]] void rethrow(const Ending& ending, size_t rank, size_t world) {
  const std::string text =
      said_rank(ending.text, static_cast<int64_t>(rank), static_cast<int64_t>(world)) + ending.text;
  const std::string origin = ending.origin;
  if (ending.kind == Ending::non_finite) throw NonFiniteError(text, origin);
  if (ending.kind == Ending::failed_check) throw FailedCheck(text, origin);
  if (ending.kind == Ending::invariant) throw BrokenInvariant(text, origin);
  throw Error(text, origin);
}

// The rank whose error came first: one that was no answer to another's.
size_t culprit(const std::vector<Ending>& endings) {
  const auto own = std::find_if(endings.begin(), endings.end(), [](const Ending& e) { return e.failed && !e.relayed; });
  if (own != endings.end()) return static_cast<size_t>(own - endings.begin());
  return static_cast<size_t>(std::find_if(endings.begin(), endings.end(), [](const Ending& e) { return e.failed != 0; }) -
                             endings.begin());
}

}  // namespace shardproof
