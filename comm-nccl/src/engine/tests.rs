//! On stand-ins for NCCL and the device.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use comm_core::local;

use super::*;
use crate::connect::connect;
use crate::sys::{Behaviour, Memory};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// The ranks of a job, connected, with their control planes.
fn ranks(count: usize, lanes: usize) -> Vec<(Comm<NcclEngine>, Arc<local::LocalControl>)> {
    let connected = move |rank: local::LocalRank| {
        let options = NcclOptions::default().on_stand_in().with_lanes(lanes);
        (connect(rank.control.clone(), &options, soon()).unwrap(), rank.control)
    };
    let threads: Vec<_> =
        local::group(count, lanes).into_iter().map(|rank| thread::spawn(move || connected(rank))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn a_device_on_which_something_runs_for_ever_is_given_up() {
    for (behaviour, is_given_up) in [(Behaviour::Works, false), (Behaviour::Hangs, true)] {
        let both = ranks(2, 1);
        let engine = both[1].0.engine();
        engine.device.behave(behaviour);
        assert_eq!(engine.has_settled(&engine.shared.lanes[0].scratch()), !is_given_up, "{behaviour:?}");
        assert_eq!(engine.device.is_given_up(), is_given_up, "{behaviour:?}");
    }
}

/// The job has failed, and what that ended has ended, before the device stops to do anything.
#[test]
fn the_last_communicator_does_not_wait_for_a_device_that_hangs() {
    let (comm, _control) = ranks(1, 2).remove(0);
    comm.abort("a test");
    let deadline = soon();
    // The communicator, its owner and the state of its group are left.
    while comm.engine().shared.failure().is_none() || Arc::strong_count(comm.engine()) > 3 {
        assert!(!deadline.has_passed(), "the threads that end NCCL's communicators go on");
        thread::sleep(Duration::from_millis(1));
    }
    let device = comm.engine().device.clone();
    device.behave(Behaviour::Hangs);
    let began = Instant::now();
    drop(comm);
    assert!(began.elapsed() < GRACE / 2, "{:?}", began.elapsed());
    // For the thread that waits.
    device.behave(Behaviour::Works);
}

/// Which it needs to learn that the job has failed.
#[test]
fn an_operation_gets_its_lane_while_another_thread_waits_for_the_device() {
    let (comm, _control) = ranks(1, 1).remove(0);
    let engine = comm.engine().clone();
    engine.device.behave(Behaviour::Hangs);
    thread::scope(|scope| {
        scope.spawn(|| engine.settle());
        let deadline = soon();
        while !engine.device.is_busy() {
            assert!(!deadline.has_passed(), "the stream is not marked");
            thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        drop(engine.shared.lanes[0].scratch());
        assert!(began.elapsed() < GRACE / 2, "{:?}", began.elapsed());
        // It would wait for all of its time.
        engine.device.behave(Behaviour::Works);
    });
    assert!(!engine.device.is_given_up());
}

#[test]
fn growable_memory_gives_back_what_it_has_outgrown_once_nothing_else_runs() {
    const MIB: usize = 1 << 20;
    let (comm, _control) = ranks(1, 2).remove(0);
    let engine = comm.engine();
    let mut state = engine.shared.lanes[0].scratch();
    let buffer_memory = &mut state.buffer;
    let mut grow = |bytes: usize| -> (usize, usize) {
        buffer_memory.of(&engine.device, bytes, || engine.quiet(0)).unwrap();
        (buffer_memory.memory.as_ref().unwrap().bytes(), buffer_memory.outgrown.iter().map(Memory::bytes).sum())
    };
    for mib in 1..200 {
        let (held, outgrown) = grow(mib * MIB);
        assert!((mib * MIB..=mib * MIB + 64 * MIB).contains(&held) && outgrown == 0, "{mib}: {held}, {outgrown}");
    }
    // Another lane is in use: nothing may be freed, and all that is kept is no more than what is used.
    let turn = engine.shared.lanes[1].try_enter(soon()).unwrap();
    for mib in (200..1000).step_by(10) {
        let (held, outgrown) = grow(mib * MIB);
        assert!(held >= mib * MIB && outgrown <= held && held <= 3 * mib * MIB, "{mib}: {held}, {outgrown}");
    }
    assert!(grow(990 * MIB).1 > 0);
    drop(turn);
    assert_eq!(grow(990 * MIB).1, 0);
}
