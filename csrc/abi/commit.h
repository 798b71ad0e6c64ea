// The commit that this library was built from.
#pragma once

namespace allnorm {

// Returns the 40-digit hash, with the suffix "-dirty" if files that are built in had uncommitted
// changes; "" if the sources were built without git.
const char* built_commit();

}  // namespace allnorm
