// A mesh: the ranks of a world arranged along named axes. Pure integers, no Torch, no communication.
//
// Ranks are numbered row-major: the last axis varies fastest, so on `dp_shard=2,tp=3` rank 4 is dp_shard 1, tp 1.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

struct Axis {
  std::string name;
  int64_t size = 1;
  bool operator==(const Axis&) const = default;
};

class Mesh {
 public:
  // The mesh of one rank and no axes.
  Mesh() = default;

  // Throws Error when a name is empty, repeated or not [a-z_][a-z0-9_]*, a size is below 1, or the product of the
  // sizes overflows 2^31 - 1.
  explicit Mesh(std::vector<Axis> axes);

  // Reads "dp_shard=2,tp=3"; "" is the mesh of one rank. Throws Error naming the column of what is malformed.
  static Mesh parse(std::string_view text);

  const std::vector<Axis>& axes() const { return axes_; }

  // The number of ranks. Law: the product of the axes' sizes.
  int64_t size() const { return size_; }

  bool has(std::string_view axis) const;

  // Position of the axis in axes(). Throws Error listing the axes there are.
  int64_t index(std::string_view axis) const;

  int64_t size(std::string_view axis) const { return axes_[index(axis)].size; }

  // Law: rank(coordinates(r)) == r for every r in [0, size()).
  std::vector<int64_t> coordinates(int64_t rank) const;
  int64_t coordinate(int64_t rank, std::string_view axis) const;
  int64_t rank(const std::vector<int64_t>& coordinates) const;

  // The ranks that differ from `rank` along the given axes at most, ascending along them with the last named axis
  // fastest; `rank` itself is among them. Law: the peer lists of all ranks partition the world.
  std::vector<int64_t> peers(int64_t rank, const std::vector<std::string>& axes) const;

  // Law: parse(str()) == *this.
  std::string str() const;

  bool operator==(const Mesh&) const = default;

 private:
  std::vector<Axis> axes_;
  int64_t size_ = 1;
};

}  // namespace shardproof
