// Everything a user of the library includes.
#pragma once

#include "shardproof/check.h"
#include "shardproof/checked.h"
#include "shardproof/comm.h"
#include "shardproof/fully_shard.h"
#include "shardproof/layout.h"
#include "shardproof/mesh.h"
#include "shardproof/mesh_comm.h"
#include "shardproof/models.h"
#include "shardproof/optimizer.h"
#include "shardproof/piece.h"
#include "shardproof/plan.h"
#include "shardproof/shard_options.h"
#include "shardproof/strategy.h"
#include "shardproof/threads.h"
#include "shardproof/traced.h"
#include "shardproof/unit.h"
