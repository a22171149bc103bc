//! What ranks tell each other about their memory, for fuzzing.

use std::cell::RefCell;

use super::{PeerInfo, ShmOptions, Token, check_settings, create, open, proof, readable};
use crate::control::{RankResult, decode, encode};
use crate::fuzzing::target::{Target, Verdict};
use crate::shm::layout::Layout;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("shm announcement", shm_announcement, seeds).inputs_per_case(8)]
}

const KEY: [u8; 32] = [5; 32];
const OPTIONS: ShmOptions = ShmOptions { lanes: 1, ring_bytes: 4096, single_copy: true, waiting: crate::Waiting::Park };

/// Memory of this process, and what its rank says of it.
type Own = (super::Segment, super::File, Token, Vec<u8>);

thread_local! {
    /// Made once: it must be there for as long as inputs speak of it.
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// A rank's announcement, as far as opening the memory that it speaks of.
pub fn shm_announcement(bytes: &[u8]) -> Verdict {
    let Ok(told) = decode::<RankResult<PeerInfo>>(bytes) else { return Verdict::Rejected };
    let Ok(theirs) = told else { return Verdict::Accepted };
    let Ok(Ok(mut mine)) = decode::<RankResult<PeerInfo>>(&announced()) else { panic!("our own announcement") };
    mine.nonce = theirs.nonce;
    let machine = mine.machine.clone();
    let peer_infos = [mine, theirs];
    let [_, theirs] = &peer_infos;
    let layout = Layout::new(2, OPTIONS.lanes, OPTIONS.ring_bytes).expect("a layout");
    let settings = check_settings(&peer_infos);
    assert_eq!(settings.is_ok(), (theirs.lanes, theirs.ring_bytes) == (OPTIONS.lanes, OPTIONS.ring_bytes));
    let opened = open(theirs, &machine, (layout, Layout::slot(1, 0)), &proof(&KEY, 0, &theirs.nonce));
    // Nothing that it says can make this rank read another process than one of the same token.
    let _ = readable(0, &peer_infos);
    (settings.is_ok() && opened.is_ok()).into()
}

/// What this process says of its memory.
fn announced() -> Vec<u8> {
    OWN.with_borrow_mut(|own| {
        let (.., announced) = own.get_or_insert_with(|| {
            let layout = Layout::new(2, OPTIONS.lanes, OPTIONS.ring_bytes).expect("a layout");
            let token = Token::generate().expect("randomness");
            let (segment, file, peer_info) = create(0, layout, &OPTIONS, Some(&token), &KEY).expect("memory");
            (segment, file, token, encode(&RankResult::Ok(peer_info)).expect("an announcement can be written"))
        });
        announced.clone()
    })
}

fn seeds() -> Vec<Vec<u8>> {
    let failed: RankResult<()> = Err("rank 1 cannot allocate 1 B of shared memory".into());
    vec![announced(), encode(&failed).expect("a text can be written")]
}
