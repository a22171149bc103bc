//! comm-nccl
