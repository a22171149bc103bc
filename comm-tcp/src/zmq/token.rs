//! The capability that a dialling socket shows in its ZMTP identity.

use crate::auth::{Edge, Key, PROOF_LEN, same};

const MAGIC: [u8; 8] = *b"isozmq01";
const PURPOSE: &[u8; 8] = b"zmq gate";
/// Bytes of a token; an identity has at most 255.
pub(crate) const TOKEN_LEN: usize = 8 + 3 * 4 + PROOF_LEN;

/// The token for one connection to the rank that announced `salt`.
pub(crate) fn issue(key: &Key, edge: Edge, salt: &[u8; PROOF_LEN]) -> Vec<u8> {
    let mut token = Vec::with_capacity(TOKEN_LEN);
    token.extend_from_slice(&MAGIC);
    token.extend_from_slice(&edge.dialler.to_le_bytes());
    token.extend_from_slice(&edge.listener.to_le_bytes());
    token.extend_from_slice(&edge.lane.to_le_bytes());
    token.extend_from_slice(&key.proof(PURPOSE, edge, &[salt]));
    token
}

/// The connection that a token is good for at the rank that announced `salt`; `None` for anything else.
pub(crate) fn verify(token: &[u8], key: &Key, salt: &[u8; PROOF_LEN]) -> Option<Edge> {
    let (magic, rest) = token.split_first_chunk::<8>()?;
    let (dialler, rest) = rest.split_first_chunk::<4>()?;
    let (listener, rest) = rest.split_first_chunk::<4>()?;
    let (lane, rest) = rest.split_first_chunk::<4>()?;
    let proof: &[u8; PROOF_LEN] = rest.try_into().ok()?;
    let edge = Edge {
        dialler: u32::from_le_bytes(*dialler),
        listener: u32::from_le_bytes(*listener),
        lane: u32::from_le_bytes(*lane),
    };
    (*magic == MAGIC && same(&key.proof(PURPOSE, edge, &[salt]), proof)).then_some(edge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_at_one_listener_and_unforgeable() {
        let (key, edge, salt) = (Key([1; 32]), Edge { dialler: 3, listener: 0, lane: 1 }, [9; 32]);
        let token = issue(&key, edge, &salt);
        assert_eq!(token.len(), TOKEN_LEN);
        assert_eq!(verify(&token, &key, &salt), Some(edge));
        assert_eq!(verify(&token, &key, &[8; 32]), None);
        assert_eq!(verify(&token, &Key([2; 32]), &salt), None);
        for index in 0..token.len() {
            let mut altered = token.clone();
            altered[index] ^= 1;
            assert_eq!(verify(&altered, &key, &salt), None, "byte {index}");
            assert_eq!(verify(&token[..index], &key, &salt), None, "cut at {index}");
        }
    }
}
