// What a disk holds after its power failed. The model is the weakest that POSIX allows, like the abstract persistence model of
// ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). As in CrashMonkey (Mohan et al., "Finding
// Crash-Consistency Bugs with Bounded Black-Box Crash Testing", OSDI 2018), calls are recorded once, and crash states are made
// from the record.
//
// - Power fails after any of the calls. What follows decides which of the calls before have reached the disk.
// - fsync of a file makes its bytes and its length last, but not its name.
// - fsync of a folder makes the names in it last: those that were made, renamed, exchanged and removed before.
// - A change of names that was not flushed has reached the disk, or has not. It is never there in part: a rename takes one name
//   away and gives another. Two changes of one name reach the disk in their order, and nothing else has an order.
// - Bytes that were not flushed have reached the disk or not, block by block. The length may have grown over blocks that
//   are not there; those hold a fill byte, or what was there before. Blocks of any size can be asked for, also of odd ones, so
//   that writes are torn anywhere.
#pragma once

#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "harness/run/lossy_disk.h"

namespace harness {

// Decides what a crash state is made of.
class Choices {
 public:
  virtual ~Choices() = default;
  // A number from 0 to count - 1.
  virtual size_t choose(size_t count) = 0;
};

// Drawn from the seed. How much of what was not flushed is there is drawn once for all: nearly nothing, half, or nearly all.
class RandomChoice : public Choices {
 public:
  explicit RandomChoice(uint64_t seed);
  size_t choose(size_t count) override;

 private:
  std::mt19937_64 random_;
  double kept_;
};

struct PowerLoss {
  uint64_t block = 4096;  // bytes that are there together or not at all
  char fill = '\0';       // what is read where a file has grown and nothing has been written
};

struct DiskState {
  std::map<std::string, std::optional<std::string>> paths;  // the bytes of files; nothing for folders
  size_t calls = 0;                                         // how many were made before power failed
  int64_t mark = 0;                                         // the last one before; 0 without any
  // One line a path, with the length of files.
  std::string str() const;
};

// A state in which the disk could be. Made of as many choices as there is to decide; the first says when power fails.
DiskState lose_power(const DiskRecord& record, Choices& choices, const PowerLoss& how = {});

// Gives the folder that content and no other.
void restore(const DiskState& state, const std::string& root);

}  // namespace harness
