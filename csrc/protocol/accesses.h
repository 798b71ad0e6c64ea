// What the ranks do with memory that they share: one table for kernels, models and machine code.
//
//   gpu/cuda/memory.cuh            makes its instructions across the link of the verbs
//   tests/cuda_accesses_test.cpp   compares what each thread of the kernels does with the rows, in
//                                  their order, and whether it does it where an operation has
//                                  failed
//   tests/cpu_accesses_test.cpp    the same of csrc/cpu
//   tests/native/protocol_model/   checks the protocol that the rows are under memory models
//   tests/native/sass/             counts the verbs in the machine code
//
// The readers of the last two take a line for a row: one row or verb a line.
#ifndef ALLNORM_PROTOCOL_ACCESSES_H_
#define ALLNORM_PROTOCOL_ACCESSES_H_

// clang-format off

// ---- CUDA: verbs, as PTX spells them ------------------------------------------------------------

//                             operation       order        type
#define ALLNORM_STORE_PACK     (st,            relaxed.sys, v4.u32)
#define ALLNORM_LOAD_PACK      (ld,            relaxed.sys, v4.u32)
#define ALLNORM_STORE_U64      (st,            relaxed.sys, u64)
#define ALLNORM_LOAD_U64       (ld,            relaxed.sys, u64)
#define ALLNORM_STORE_U32      (st,            relaxed.sys, u32)
#define ALLNORM_LOAD_U32       (ld,            relaxed.sys, u32)
#define ALLNORM_ACQUIRE_U32    (ld,            acquire.sys, u32)
#define ALLNORM_CLEAR_PACK     (st,            weak,        v4.u32)
#define ALLNORM_CLEAR_U64      (st,            weak,        u64)
#define ALLNORM_CLEAR_U32      (st,            weak,        u32)
#define ALLNORM_FENCE          (fence,         acq_rel.sys, none)
#define ALLNORM_GRID_WAIT      (griddepcontrol, wait,       none)
#define ALLNORM_BLOCK_BARRIER  (barrier,       cta,         none)

// The instruction of a verb, without its operands.
#define ALLNORM_PTX(verb) ALLNORM_PTX_OF verb
#define ALLNORM_PTX_OF(operation, order, type) #operation "." #order ".global." #type
#define ALLNORM_PTX_FENCE(verb) ALLNORM_PTX_FENCE_OF verb
#define ALLNORM_PTX_FENCE_OF(operation, order, type) #operation "." #order

// ---- CUDA: accesses, in the order of each part --------------------------------------------------
//
// part      what a thread does: the lanes that call the roll or hand slots back, one for each peer,
//           and the threads of rows. A large operation begins with `head` in every block. Of a row
//           every thread does `send`; whoever sums does `own`, in one_shot everybody; the others do
//           `receive`. Rows with owners: sums and rows of the dtype of x are `rows`, finished rows
//           in their format `packed`, behind the exchange of partials `owners`.
// place     of the own workspace where it is loaded or cleared, else of a peer's
// number    what is stored or waited for: the operation's (op), the last before it that handed
//           slots back (last), the tag, a payload
// when      large: in large operations. hands_back: in operations that hand slots back, by ranks
//           that have not failed. unless_failed: not by a thread whose wait has failed in this
//           operation or before; unless_failed_before: not after an earlier operation has failed.
//           What is loaded, is loaded by who has not failed.
// partner   the part of a peer that reads what is stored or stores what is read
#define ALLNORM_ACCESSES(ACCESS) \
  /*     part             place     verb           number   when                  partner          */ \
  ACCESS(begin,           none,     GRID_WAIT,     none,    always,               none             ) \
  ACCESS(head,            released, ACQUIRE_U32,   last,    large,                hand_back        ) \
  ACCESS(head,            none,     BLOCK_BARRIER, none,    large,                none             ) \
  ACCESS(roll_call,       tag0,     STORE_U64,     tag,     unless_failed_before, roll_call        ) \
  ACCESS(roll_call,       tag1,     STORE_U64,     tag,     unless_failed_before, roll_call        ) \
  ACCESS(roll_call,       tag0,     LOAD_U64,      tag,     always,               roll_call        ) \
  ACCESS(roll_call,       tag1,     LOAD_U64,      tag,     always,               roll_call        ) \
  ACCESS(hand_back,       none,     FENCE,         none,    hands_back,           hand_back        ) \
  ACCESS(hand_back,       released, STORE_U32,     op,      hands_back,           hand_back        ) \
  ACCESS(hand_back,       released, ACQUIRE_U32,   last,    always,               hand_back        ) \
  ACCESS(one_shot_send,   partial,  STORE_PACK,    payload, unless_failed,        one_shot_own     ) \
  ACCESS(one_shot_own,    partial,  LOAD_PACK,     payload, always,               one_shot_send    ) \
  ACCESS(one_shot_own,    partial,  CLEAR_PACK,    none,    always,               one_shot_send    ) \
  ACCESS(two_shot_send,   partial,  STORE_PACK,    payload, unless_failed,        two_shot_own     ) \
  ACCESS(two_shot_own,    partial,  LOAD_PACK,     payload, always,               two_shot_send    ) \
  ACCESS(two_shot_own,    finished, STORE_PACK,    payload, unless_failed_before, two_shot_receive ) \
  ACCESS(two_shot_own,    partial,  CLEAR_PACK,    none,    unless_failed_before, two_shot_send    ) \
  ACCESS(two_shot_receive, finished, LOAD_PACK,    payload, always,               two_shot_own     ) \
  ACCESS(two_shot_receive, finished, CLEAR_PACK,   none,    always,               two_shot_own     ) \
  ACCESS(owners_send,     partial,  STORE_PACK,    payload, unless_failed,        owners_own       ) \
  ACCESS(owners_own,      partial,  LOAD_PACK,     payload, always,               owners_send      ) \
  ACCESS(owners_own,      partial,  CLEAR_PACK,    none,    always,               owners_send      ) \
  ACCESS(rows_own,        finished, STORE_PACK,    payload, unless_failed_before, rows_receive     ) \
  ACCESS(rows_receive,    finished, LOAD_PACK,     payload, always,               rows_own         ) \
  ACCESS(rows_receive,    finished, CLEAR_PACK,    none,    always,               rows_own         ) \
  ACCESS(packed_own,      finished, STORE_U64,     payload, unless_failed_before, packed_receive   ) \
  ACCESS(packed_own,      scale,    STORE_U32,     payload, unless_failed_before, packed_receive   ) \
  ACCESS(packed_receive,  finished, LOAD_U64,      payload, always,               packed_own       ) \
  ACCESS(packed_receive,  finished, CLEAR_U64,     none,    always,               packed_own       ) \
  ACCESS(packed_receive,  scale,    LOAD_U32,      payload, always,               packed_own       ) \
  ACCESS(packed_receive,  scale,    CLEAR_U32,     none,    always,               packed_own       ) \
  ACCESS(probe,           probe,    STORE_U32,     probe,   always,               none             )

// ---- CPU: verbs are the functions of cpu/memory.h; accesses --------------------------------------
//
// A part is a function of cpu/comm.cpp. Behind `publish`, `wait` and `read` stands a step of the
// operation; rows are plain memory. What is published or announced lies in the own workspace; what
// is waited for or compared in a peer's.
#define ALLNORM_CPU_ACCESSES(ACCESS) \
  /*     part       place      order    partner  */ \
  ACCESS(announce,  tag,       relaxed, compare ) \
  ACCESS(publish,   published, seq_cst, wait    ) \
  ACCESS(publish,   sleepers,  seq_cst, sleep   ) \
  ACCESS(wait,      published, acquire, publish ) \
  ACCESS(compare,   tag,       relaxed, announce) \
  ACCESS(sleep,     sleepers,  seq_cst, publish ) \
  ACCESS(sleep,     published, seq_cst, publish )

// What each algorithm does with one chunk.
#define ALLNORM_CPU_ALGORITHMS(DO) \
  DO(one_shot,   announce) \
  DO(one_shot,   write_partial) \
  DO(one_shot,   publish_1) \
  DO(one_shot,   wait_1) \
  DO(one_shot,   read_partial) \
  DO(two_shot,   announce) \
  DO(two_shot,   write_partial) \
  DO(two_shot,   publish_1) \
  DO(two_shot,   wait_1) \
  DO(two_shot,   read_partial) \
  DO(two_shot,   write_sum) \
  DO(two_shot,   publish_2) \
  DO(two_shot,   wait_2) \
  DO(two_shot,   read_sum) \
  DO(all_gather, announce) \
  DO(all_gather, write_partial) \
  DO(all_gather, publish_1) \
  DO(all_gather, wait_1) \
  DO(all_gather, read_partial)

// clang-format on

#endif  // ALLNORM_PROTOCOL_ACCESSES_H_
