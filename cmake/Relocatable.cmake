# What is built names no folder of this machine, so that it runs elsewhere out of one folder. Three links in that folder say
# where the rest is: `env`, an environment of Python; `packages`, the packages that have torch; `source`, this tree. ci/gpu
# makes them. What is left are names of sources in messages (__FILE__), which ci/prebuilt shortens: -ffile-prefix-map would
# keep a build from what ccache has of other builds, and they are most of its time.
set(SHARDPROOF_AT_VENV env)
set(SHARDPROOF_AT_SOURCE source)
set(SHARDPROOF_AT_BUILD .)

# Programs lie in the folder itself, and modules of Python two folders below it.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
foreach(_top "$ORIGIN" "$ORIGIN/../..")
  list(APPEND CMAKE_INSTALL_RPATH "${_top}")
  foreach(_libraries torch/lib nvidia/cu13/lib nvidia/nccl/lib)
    list(APPEND CMAKE_INSTALL_RPATH "${_top}/packages/${_libraries}")
  endforeach()
endforeach()
