# The sources of a target, room by room: a room is a folder of its area, and the folders are the layers (ci/check_layers).

# shardproof_room(TARGET ROOM [UNDER FOLDER] FILE...): adds the sources FILE... of the room to the target. Rooms lie under src/
# of the current folder, or UNDER another one; `.` stands for the current folder itself.
#   shardproof_room(shardproof comm/threads threads.cpp threads_exchange.cpp)
#   shardproof_room(harness case UNDER . case.cpp)
# Files of a room are compiled in groups (see Options.cmake), in the order of the list.
function(shardproof_room target room)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "UNDER" "")
  if(NOT DEFINED ARG_UNDER)
    set(ARG_UNDER src)
  endif()
  cmake_path(SET folder NORMALIZE "${CMAKE_CURRENT_SOURCE_DIR}/${ARG_UNDER}/${room}")
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  if(target IN_LIST SHARDPROOF_ALONE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  endif()
  string(MAKE_C_IDENTIFIER "${room}" group)
  set(index 0)
  foreach(file IN LISTS ARG_UNPARSED_ARGUMENTS)
    cmake_path(SET source NORMALIZE "${folder}/${file}")
    target_sources(${target} PRIVATE "${source}")
    math(EXPR part "${index} / ${SHARDPROOF_GROUP_SIZE}")
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${group}_${part}")
    math(EXPR index "${index} + 1")
  endforeach()
endfunction()
