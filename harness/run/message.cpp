#include "harness/run/message.h"

#include <c10/util/Exception.h>

#include <new>

#include "shardproof/base/escape.h"

namespace harness {

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return "out of memory; use a smaller model, mesh or batch";
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return shardproof::escaped_lines(torch_error ? torch_error->what_without_backtrace() : error.what());
}

}  // namespace harness
