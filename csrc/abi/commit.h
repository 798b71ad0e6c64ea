// The commit that this library was built from.
#ifndef ALLNORM_ABI_COMMIT_H_
#define ALLNORM_ABI_COMMIT_H_

namespace allnorm {

// Returns the hash of 40 digits, with the suffix "-dirty" if files that are built in had uncommitted
// changes; "" if the sources were built without git.
const char* built_commit();

}  // namespace allnorm

#endif  // ALLNORM_ABI_COMMIT_H_
