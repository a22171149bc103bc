//! TLS handshakes on whose way bytes were changed, for fuzzing. TLS itself is rustls's; which certificates are accepted is ours.

use std::cell::RefCell;
use std::sync::Arc;

use comm_core::fuzzing::{Target, Verdict};
use quinn::crypto::{ClientConfig, ServerConfig, Session};
use quinn_proto::transport_parameters::TransportParameters;

use super::{Identity, Pins, SERVER_NAME};

pub(crate) fn targets() -> Vec<Target> {
    // A handshake's own buffers and keys.
    vec![Target::new("quic handshake", quic_handshake, seeds).inputs_per_case(2).memory(512 << 10, 64)]
}

/// QUIC version 1 (RFC 9000).
const VERSION: u32 = 1;

thread_local! {
    /// Of a rank, of the one that it expects, and of a stranger. Keys take a while to make.
    static IDENTITIES: RefCell<Option<[Identity; 3]>> = const { RefCell::new(None) };
}

/// A handshake between two ranks, of which bytes are changed on the way: an input is a list of changes, each of four bytes (which
/// piece of the handshake, where in it in two bytes, and what is changed). The seventh piece is none, and stands for a stranger
/// in the place of the rank that dials, the eighth for one in the place of the other.
pub fn quic_handshake(bytes: &[u8]) -> Verdict {
    let changes: Vec<[u8; 4]> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|[piece, rest @ ..]| {
            let [a, b, c] = *rest;
            [piece % 8, a, b, c]
        })
        .collect();
    let has = |piece| changes.iter().any(|change| change[0] == piece);
    IDENTITIES.with_borrow_mut(|identities| {
        let make = || Identity::generate().expect("a key");
        let identities = identities.get_or_insert_with(|| [make(), make(), make()]);
        let [dials, answers, stranger] = &*identities;
        let (expected_dialler, expected_answerer) = (dials.fingerprint(), answers.fingerprint());
        let dials = if has(6) { stranger } else { dials };
        let answers = if has(7) { stranger } else { answers };
        let client = dials.client_config(0, expected_answerer).expect("a configuration");
        let pins = Pins::new(std::iter::once((1, expected_dialler)));
        let server: Arc<dyn ServerConfig> = answers.server_config(&pins).expect("a configuration");
        let parameters = TransportParameters::read(quinn::Side::Client, &mut &[][..]).expect("none is as good as any");
        let client: Arc<dyn ClientConfig> = client;
        let client = client.start_session(VERSION, SERVER_NAME, &parameters).expect("a session");
        let server = server.start_session(VERSION, &parameters);
        let (is_changed, is_complete) = shake_hands(client, server, &changes);
        let is_stranger = has(6) || has(7);
        assert_eq!(
            is_complete,
            !is_changed && !is_stranger,
            "a handshake succeeds exactly as it was meant by the two ranks"
        );
        is_complete.into()
    })
}

/// Whether a byte was changed on the way, and whether both sides then think that the handshake is complete.
fn shake_hands(mut client: Box<dyn Session>, mut server: Box<dyn Session>, changes: &[[u8; 4]]) -> (bool, bool) {
    let (mut is_changed, mut number) = (false, 0);
    for _ in 0..4 {
        for client_speaks in [true, false] {
            let (from, to) = if client_speaks { (&mut client, &mut server) } else { (&mut server, &mut client) };
            loop {
                let mut piece = Vec::new();
                let keys = from.write_handshake(&mut piece);
                if piece.is_empty() && keys.is_none() {
                    break;
                }
                let original = piece.clone();
                for [_, high, low, change] in changes.iter().filter(|change| change[0] == number) {
                    if let Some(byte) = piece.get_mut(usize::from(u16::from_be_bytes([*high, *low]))) {
                        *byte ^= change;
                    }
                }
                is_changed |= piece != original;
                number += u8::from(!piece.is_empty());
                if !piece.is_empty() && to.read_handshake(&piece).is_err() {
                    return (is_changed, false);
                }
            }
        }
    }
    (is_changed, !client.is_handshaking() && !server.is_handshaking())
}

fn seeds() -> Vec<Vec<u8>> {
    // Nothing changed; changes that are none; and one that a piece is too short for.
    vec![Vec::new(), vec![0, 0, 40, 0, 1, 0, 60, 0, 2, 1, 200, 0, 3, 0, 90, 0], vec![0, 0xff, 0xff, 1]]
}
