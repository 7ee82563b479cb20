// The communicators of a mesh: one group for every axis, or set of axes, along which ranks talk.
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
  // Collective over `world`, whose rank r is rank r of the mesh. Throws Error, naming both, when their sizes differ.
  MeshComm(std::shared_ptr<Comm> world, Mesh mesh);

  // The same ranks along other axes. Throws Error as above.
  std::shared_ptr<MeshComm> on(const Mesh& mesh) const { return std::make_shared<MeshComm>(world_, mesh); }

  const Mesh& mesh() const { return mesh_; }
  int64_t rank() const { return world_->rank(); }
  Comm& world() { return *world_; }

  // The group of this rank's peers along these axes. Law: its ranks are mesh().peers(rank(), axes), in that order. The
  // first request for a set of axes is collective over the world.
  Comm& along(const std::vector<std::string>& axes);

  // The group of `ranks` neighbours along one axis that this rank is in: coordinates [k * ranks, (k + 1) * ranks). Throws Error
  // unless the axis' size is a multiple. The first request is collective over the world.
  Comm& within(const std::string& axis, int64_t ranks);

 private:
  std::shared_ptr<Comm> world_;
  Mesh mesh_;
  std::map<std::vector<std::string>, std::shared_ptr<Comm>> groups_;
  std::map<std::pair<std::string, int64_t>, std::shared_ptr<Comm>> neighbours_;
};

}  // namespace shardproof
