//! Long messages that are copied once: the receiver reads them out of the memory of the sender's process, with `process_vm_readv`.
//!
//! Not every system allows that: kernels are built without it, sandboxes forbid it, and Yama's `ptrace_scope` restricts it to
//! ancestors and to root, an exception from which would end with the program that started the ranks. So each rank tries it on each other one when they connect, and all use it if it works everywhere.
//!
//! Numbers of processes are used again. Therefore every read also reads the peer's token, a random value at an address that the peer announced; if it
//! is not what was announced, another process has been read.

use std::fs;
use std::io;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::control::RankResult;
use crate::sys;

const TOKEN_LEN: usize = 16;

/// What a rank tells the others so that they can read its memory.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MemoryInfo {
    token: [u8; TOKEN_LEN],
    address: u64,
}

/// This rank's token, which stays where it is.
pub(super) struct Token(Box<[u8; TOKEN_LEN]>);

impl Token {
    pub(super) fn generate() -> RankResult<Self> {
        let mut token = Box::new([0; TOKEN_LEN]);
        getrandom::fill(&mut *token).map_err(|error| format!("cannot get random bytes: {error}"))?;
        Ok(Token(token))
    }

    pub(super) fn info(&self) -> MemoryInfo {
        MemoryInfo { token: *self.0, address: self.0.as_ptr().addr() as u64 }
    }
}

/// How a transport copies once.
pub(super) struct SingleCopy {
    /// By rank; none for this one.
    pub(super) peers: Vec<Option<PeerMemory>>,
    /// For the others to read.
    pub(super) _own: Token,
}

/// The memory of a peer's process.
pub(super) struct PeerMemory {
    process: u32,
    info: MemoryInfo,
}

impl PeerMemory {
    /// That of a process that is there now, and lets this one read its memory.
    ///
    /// # Errors
    /// Why it does not.
    pub(super) fn probe(process: u32, info: &MemoryInfo) -> RankResult<Self> {
        let memory = PeerMemory { process, info: info.clone() };
        let mut token = [0; TOKEN_LEN];
        match memory.read(info.address, &mut token) {
            Ok(()) if token == info.token => Ok(memory),
            Ok(()) => Err("its process id belongs to another process".into()),
            Err(error) => Err(explain(&error)),
        }
    }

    /// Fills `into` with what lies at `address` in that process.
    ///
    /// # Errors
    /// The kernel's; `NotFound` once the process has gone.
    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let mut token = [0; TOKEN_LEN];
        let whole = token.len() + into.len();
        let count = sys::read_process(self.process, [(self.info.address, &mut token), (address, into)])?;
        if token != self.info.token {
            return Err(io::Error::new(io::ErrorKind::NotFound, "its process id belongs to another process"));
        }
        if count == whole { Ok(()) } else { Err(Errno::FAULT.into()) }
    }
}

/// Yama's restriction, where the kernel has it.
fn ptrace_scope() -> Option<u32> {
    fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

fn explain(error: &io::Error) -> String {
    match (Errno::from_io_error(error), ptrace_scope()) {
        (Some(Errno::NOSYS), _) => format!("{error}: the kernel has no process_vm_readv, or a sandbox hides it"),
        (Some(Errno::PERM), Some(scope)) if scope > 0 => {
            format!("{error}: /proc/sys/kernel/yama/ptrace_scope is {scope}; 0 allows it to all processes of a user")
        }
        (Some(Errno::PERM | Errno::ACCESS), _) => {
            format!("{error}: the system does not let one rank read another's memory")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_only_from_the_process_that_was_announced() {
        let token = Token::generate().unwrap();
        let memory = PeerMemory::probe(std::process::id(), &token.info()).unwrap();
        let data: Vec<u8> = (0..100_000).map(|index| index as u8).collect();
        let mut copy = vec![0; data.len()];
        memory.read(data.as_ptr().addr() as u64, &mut copy).unwrap();
        assert!(copy == data);
        // An address where there is nothing, and one of which only the beginning is there.
        assert!(memory.read(64, &mut copy).is_err());
        assert!(memory.read(u64::MAX - 64, &mut copy).is_err());

        let other = MemoryInfo { token: [1; TOKEN_LEN], ..token.info() };
        let why = PeerMemory::probe(std::process::id(), &other).err().unwrap();
        assert!(why.contains("another process"), "{why}");
        let gone = PeerMemory { process: u32::try_from(i32::MAX).unwrap(), info: token.info() };
        assert!(gone.read(data.as_ptr().addr() as u64, &mut copy).is_err());
    }
}
