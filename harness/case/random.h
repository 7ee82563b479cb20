// Random numbers from counters: every draw is a pure function of (seed, site, index), so no draw depends on how many were
// made before it, on the rank or on the thread.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace harness {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A stream of draws at one site, e.g. Draws(seed, "input").at(rank).
class Draws {
 public:
  Draws(uint64_t seed, std::string_view site) : key_(mix(seed)) {
    for (const char c : site) key_ = mix(key_ ^ static_cast<unsigned char>(c));
  }
  Draws at(int64_t index) const { return Draws(mix(key_ + 0x632be59bd9b4e019 * static_cast<uint64_t>(index + 1))); }

  uint64_t bits(int64_t index) const { return mix(key_ ^ mix(static_cast<uint64_t>(index))); }
  // In [low, high], both included.
  int64_t integer(int64_t index, int64_t low, int64_t high) const {
    return low + static_cast<int64_t>(bits(index) % static_cast<uint64_t>(high - low + 1));
  }
  // In [0, 1), a multiple of 2^-24.
  double unit(int64_t index) const { return static_cast<double>(bits(index) >> 40) * 0x1p-24; }

 private:
  explicit Draws(uint64_t key) : key_(key) {}
  uint64_t key_;
};

// Draws one after the other, for generators.
class Chooser {
 public:
  explicit Chooser(Draws draws) : draws_(draws) {}
  uint64_t bits() { return draws_.bits(next_++); }
  int64_t integer(int64_t low, int64_t high) { return draws_.integer(next_++, low, high); }
  double unit() { return draws_.unit(next_++); }
  bool chance(double probability) { return unit() < probability; }
  template <class T>
  T one_of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(integer(0, static_cast<int64_t>(choices.size()) - 1))];
  }

 private:
  Draws draws_;
  int64_t next_ = 0;
};

}  // namespace harness
