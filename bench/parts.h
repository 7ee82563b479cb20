// Parts of the library, each on its own on one thread, whose instructions callgrind counts (parts_count.cpp).
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace bench {

struct Part {
  std::string name;
  // Returns what is measured. It may be called any number of times, and each time does the same amount of work.
  std::function<std::function<void()>()> prepare;
};

std::vector<Part> parts();
// Bookkeeping in two sizes each: growth/NAME/SIZE may grow as the size does, and level/NAME/SIZE may not grow.
std::vector<Part> parts_of_growth();

}  // namespace bench
