// A mesh arranges the ranks of a world along named axes, as PyTorch's DeviceMesh does. This header is arithmetic on integers
// only.
//
// Ranks are numbered in row-major order, so the last axis varies fastest: on `dp_shard=2,tp=3` rank 4 is dp_shard 1, tp 1.
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

  // Throws Error when a name occurs twice or does not match [a-z_][a-z0-9_]*, when a size is below 1, or when the product of
  // the sizes exceeds 2^31 - 1.
  explicit Mesh(std::vector<Axis> axes);

  // Reads a text such as "dp_shard=2,tp=3"; "" is the mesh of one rank. Throws Error, which names the column, when it is
  // malformed.
  static Mesh parse(std::string_view text);

  const std::vector<Axis>& axes() const { return axes_; }

  // The number of ranks. Law: the product of the axes' sizes.
  int64_t size() const { return size_; }

  bool has(std::string_view axis) const;

  // The position of the axis in axes(). Throws Error, which lists the axes, when there is no such axis.
  int64_t index(std::string_view axis) const;

  int64_t size(std::string_view axis) const { return axes_[index(axis)].size; }

  // Law: rank(coordinates(r)) == r for every r in [0, size()).
  std::vector<int64_t> coordinates(int64_t rank) const;
  int64_t coordinate(int64_t rank, std::string_view axis) const;
  int64_t rank(const std::vector<int64_t>& coordinates) const;

  // The ranks whose coordinates equal those of `rank` along all other axes; `rank` itself is among them. They are ascending
  // along the given axes, of which the last one varies fastest. Law: the lists of all ranks partition the world.
  std::vector<int64_t> peers(int64_t rank, const std::vector<std::string>& axes) const;

  // Law: parse(str()) == *this.
  std::string str() const;

  bool operator==(const Mesh&) const = default;

 private:
  std::vector<Axis> axes_;
  int64_t size_ = 1;
};

}  // namespace shardproof
