// The communicators of a mesh. There is one group for each axis, or set of axes, along which ranks communicate.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/algebra/mesh.h"
#include "shardproof/comm/comm.h"

namespace shardproof {

class MeshComm {
 public:
  // Rank r of `world` is rank r of the mesh. Throws Error, which names both sizes, when they differ. Collective over `world`.
  MeshComm(std::shared_ptr<Comm> world, Mesh mesh);

  // Arranges the same ranks on another mesh. Throws Error as the constructor does. Collective over the world.
  std::shared_ptr<MeshComm> on(const Mesh& mesh) const { return std::make_shared<MeshComm>(world_, mesh); }

  const Mesh& mesh() const { return mesh_; }
  int64_t rank() const { return world_->rank(); }
  Comm& world() { return *world_; }

  // Which part of a step's samples this rank reads, of data_size() parts: its place along dp_replicate and dp_shard together,
  // where dp_shard varies fastest, whatever the order of the mesh's axes. Ranks that differ along other axes only, such as tp
  // and cp, read the same samples. On a mesh without these two axes every rank reads part 0 of 1.
  int64_t data_rank() const;
  int64_t data_size() const;

  // Returns the group of this rank's peers along these axes. Law: its ranks are mesh().peers(rank(), axes), in that order: of
  // the axes the last varies fastest, and every rank passes them in the same order. The first call for a list of axes makes
  // the group and is collective over the world. The group lives as long as this object. Throws Error when the mesh has no such
  // axis.
  Comm& along(const std::vector<std::string>& axes);

  // Cuts the axis into groups of `ranks` neighbours and returns this rank's group: the coordinates [k * ranks, (k + 1) * ranks)
  // for some k. Throws Error unless the axis' size is a multiple of `ranks`. The first call makes the group and is collective
  // over the world.
  Comm& within(const std::string& axis, int64_t ranks);

 private:
  std::shared_ptr<Comm> world_;
  Mesh mesh_;
  std::map<std::vector<std::string>, std::shared_ptr<Comm>> groups_;
  std::map<std::pair<std::string, int64_t>, std::shared_ptr<Comm>> neighbours_;
};

}  // namespace shardproof
