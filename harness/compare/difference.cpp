#include "harness/compare/difference.h"

#include <fmt/format.h>

namespace harness {

std::string Difference::str() const {
  std::string text = value;
  if (!tensor.empty()) text += fmt::format(" of {}", tensor);
  if (!element.empty()) text += fmt::format(", element {}", element);
  if (rank >= 0) text += fmt::format("{} on rank {}", element.empty() ? "" : ",", rank);
  if (round >= 0) text += fmt::format(", round {}", round);
  return fmt::format("{}: {}", text, says);
}

Difference number_on(size_t rank, std::string value, std::string says) {
  return {.value = std::move(value), .rank = static_cast<int64_t>(rank), .says = std::move(says)};
}

Difference element_on(size_t rank, std::string value, std::string tensor, std::string element, std::string says) {
  return {.value = std::move(value),
          .tensor = std::move(tensor),
          .element = std::move(element),
          .rank = static_cast<int64_t>(rank),
          .says = std::move(says)};
}

}  // namespace harness
