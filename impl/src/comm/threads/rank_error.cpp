#include "comm/threads/rank_error.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <typeinfo>

#include "shardproof/base/check.h"

namespace shardproof::threads {
namespace {

template <typename E>
[[noreturn]] void rethrow_prefixed(const E& error, const std::string& who) {
  // A derived type would lose what it adds.
  if (typeid(error) != typeid(E)) throw;
  throw E(who + error.what());
}

}  // namespace

void rethrow_with_rank(const std::exception_ptr& error, int64_t rank, int64_t world) {
  if (rank < 0) std::rethrow_exception(error);
  const std::string who = fmt::format("rank {} of {}: ", rank, world);
  try {
    std::rethrow_exception(error);
  } catch (const NonFiniteError& e) {
    rethrow_prefixed(e, who);
  } catch (const Error& e) {
    rethrow_prefixed(e, who);
  } catch (const BrokenInvariant& e) {
    rethrow_prefixed(e, who);
  } catch (c10::Error& e) {
    e.add_context(who + "LibTorch refused");
    throw;
  } catch (const std::invalid_argument& e) {
    rethrow_prefixed(e, who);
  } catch (const std::runtime_error& e) {
    rethrow_prefixed(e, who);
  }
}

}  // namespace shardproof::threads
