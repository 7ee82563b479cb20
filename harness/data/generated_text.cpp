#include "harness/data/generated_text.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <iterator>

#include "harness/case/random.h"

namespace harness {
namespace {

constexpr size_t kBytes = 1 << 20;
constexpr std::array kQualities = {"old", "small", "green", "quiet", "heavy", "bright", "narrow", "patient"};
constexpr std::array kPeople = {"baker", "captain", "farmer", "miller", "painter", "sailor", "smith", "teacher"};
constexpr std::array kDeeds = {"carries", "counts", "draws", "finds", "hides", "mends", "paints", "sells"};
constexpr std::array kThings = {"baskets", "boats", "books", "bridges", "clocks", "lamps", "maps", "wheels"};

}  // namespace

std::string generated_text() {
  const Draws draws(0, "text");
  std::string text;
  text.reserve(kBytes + 64);
  for (int64_t line = 0; text.size() < kBytes; ++line) {
    const Draws draw = draws.at(line);
    const auto word = [&](int64_t index, const auto& words) { return words[draw.bits(index) % words.size()]; };
    const int64_t a = draw.integer(0, 1, 50), b = draw.integer(1, 1, 50);
    if (line % 4 == 3)
      fmt::format_to(std::back_inserter(text), "{} and {} are {}.\n", a, b, a + b);
    else
      fmt::format_to(std::back_inserter(text), "the {} {} {} {} {} {}.\n", word(2, kQualities), word(3, kPeople),
                     word(4, kDeeds), a, word(5, kQualities), word(6, kThings));
  }
  text.resize(kBytes);
  return text;
}

}  // namespace harness
