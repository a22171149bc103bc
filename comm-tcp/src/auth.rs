//! Proofs that a connection belongs to the job.

use comm_core::{Error, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Bytes of a proof and of a nonce.
pub(crate) const PROOF_LEN: usize = 32;

/// A key that only the ranks of this job know.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) [u8; 32]);

/// One directed connection: who dials, who listens, which lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {
    pub(crate) dialler: u32,
    pub(crate) listener: u32,
    pub(crate) lane: u32,
}

impl Key {
    /// HMAC-SHA256 over a purpose, the connection, and nonces that make the proof good for one connection only.
    pub(crate) fn proof(&self, purpose: &[u8; 8], edge: Edge, nonces: &[&[u8; PROOF_LEN]]) -> [u8; PROOF_LEN] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of every length");
        // Every field has a fixed length, so no two inputs share an encoding.
        mac.update(purpose);
        mac.update(&edge.dialler.to_le_bytes());
        mac.update(&edge.listener.to_le_bytes());
        mac.update(&edge.lane.to_le_bytes());
        for nonce in nonces {
            mac.update(*nonce);
        }
        mac.finalize().into_bytes().into()
    }
}

/// Whether two proofs are equal, in a time that does not depend on where they differ.
pub(crate) fn same(ours: &[u8; PROOF_LEN], theirs: &[u8; PROOF_LEN]) -> bool {
    bool::from(ours.ct_eq(theirs))
}

/// A nonce from the operating system.
pub(crate) fn nonce() -> Result<[u8; PROOF_LEN]> {
    let mut nonce = [0; PROOF_LEN];
    getrandom::fill(&mut nonce)
        .map_err(|error| Error::io("reading random bytes from the system", std::io::Error::other(error.to_string())))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_purpose_connection_and_nonce_only() {
        let key = Key([7; 32]);
        let edge = Edge { dialler: 2, listener: 1, lane: 0 };
        let proof = key.proof(b"purposeA", edge, &[&[1; 32]]);
        assert!(same(&proof, &key.proof(b"purposeA", edge, &[&[1; 32]])));
        let others = [
            Key([8; 32]).proof(b"purposeA", edge, &[&[1; 32]]),
            key.proof(b"purposeB", edge, &[&[1; 32]]),
            key.proof(b"purposeA", Edge { lane: 1, ..edge }, &[&[1; 32]]),
            key.proof(b"purposeA", Edge { dialler: 1, listener: 2, ..edge }, &[&[1; 32]]),
            key.proof(b"purposeA", edge, &[&[2; 32]]),
        ];
        assert!(others.iter().all(|other| !same(&proof, other)));
    }
}
