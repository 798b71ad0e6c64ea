// The commit that this library was built from.
#include "abi/commit.h"

#include <built_commit.h>  // written by cmake/commit.cmake

namespace allnorm {

const char* built_commit() { return ALLNORM_COMMIT; }

}  // namespace allnorm
