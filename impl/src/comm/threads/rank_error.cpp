#include "comm/threads/rank_error.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <typeinfo>

#include "comm/said_rank.h"
#include "shardproof/base/check.h"

namespace shardproof::threads {
namespace {

template <typename E>
[[noreturn]] void rethrow_prefixed(const E& error, int64_t rank, int64_t world) {
  // A derived type would lose what it adds.
  if (typeid(error) != typeid(E)) throw;
  const std::string text = said_rank(error.what(), rank, world) + error.what();
  if constexpr (requires { error.origin(); })
    throw E(text, error.origin());
  else
    throw E(text);
}

}  // namespace

void rethrow_with_rank(const std::exception_ptr& error, int64_t rank, int64_t world) {
  if (rank < 0) std::rethrow_exception(error);
  try {
    std::rethrow_exception(error);
  } catch (const NonFiniteError& e) {
    rethrow_prefixed(e, rank, world);
  } catch (const Error& e) {
    rethrow_prefixed(e, rank, world);
  } catch (const BrokenInvariant& e) {
    rethrow_prefixed(e, rank, world);
  } catch (c10::Error& e) {
    e.add_context(said_rank("", rank, world) + "LibTorch refused");
    throw;
  } catch (const std::invalid_argument& e) {
    rethrow_prefixed(e, rank, world);
  } catch (const std::runtime_error& e) {
    rethrow_prefixed(e, rank, world);
  }
}

}  // namespace shardproof::threads
