//! What ends a communicator: ranks that disagree, ranks that are late, abort, and an orderly finish.
//!
//! Every case here runs on a group of its own. Ranks do not meet before the failure: the rank that causes it could be ahead of
//! others that are still on their way out of a barrier, which then fails with it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::data::{Pattern, check};
use super::{CallMode, Case, CaseResult, SLACK, Step, TIMEOUT, barrier, call, ensure, failed, need_lanes, run};
use crate::buffer::{Buffer, Element};
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::error::Error;
use crate::handle::{Completed, Failed, Outcome};
use crate::op::{BorrowedCall, Call, Mode, Op};

const SUM: ReduceOp = ReduceOp::Sum;

/// The deadline that late ranks miss.
const SHORT: Duration = Duration::from_millis(150);

pub(super) fn add(cases: &mut Vec<Case>) {
    add_mismatches(cases);
    add_timeouts(cases);
    add_aborts(cases);
    add_agreements(cases);
    add_finishes(cases);
}

// ---------------------------------------------------------------------------------------------------------------- mismatches

/// What a rank calls in a mismatch, on lane 0.
enum MismatchedCall {
    F32(Op, usize),
    I32(Op, usize),
}

fn add_mismatches(cases: &mut Vec<Case>) {
    use MismatchedCall::{F32, I32};
    let mut add = |name: &str, calls: fn(usize, usize) -> Vec<MismatchedCall>| {
        for mode in [Mode::Blocking, Mode::Background] {
            let way = if mode == Mode::Blocking { "blocking" } else { "background" };
            cases.push(Case::fresh(format!("mismatch/{name}/{way}"), 2, move |communicator| {
                mismatch(communicator, calls(communicator.rank(), communicator.world_size()), mode)
            }));
        }
    };
    // The last rank is the one that differs.
    add("count", |rank, ranks| vec![F32(Op::AllReduce(SUM), if rank + 1 == ranks { 11 } else { 10 })]);
    add("count_and_algorithm", |rank, ranks| {
        vec![F32(Op::AllReduce(SUM), if rank + 1 == ranks { 10 } else { 100_003 })]
    });
    add("type", |rank, ranks| {
        let op = Op::AllReduce(SUM);
        vec![if rank + 1 == ranks { I32(op, 10_007) } else { F32(op, 10_007) }]
    });
    add("reduction", |rank, ranks| {
        vec![F32(Op::AllReduce(if rank + 1 == ranks { ReduceOp::Max } else { SUM }), 10_007)]
    });
    add("operation", |rank, ranks| {
        vec![F32(if rank + 1 == ranks { Op::ReduceScatter(SUM) } else { Op::AllReduce(SUM) }, 10_007)]
    });
    add("operation_without_payload", |rank, ranks| {
        vec![if rank + 1 == ranks { F32(Op::Barrier, 0) } else { F32(Op::AllReduce(SUM), 10) }]
    });
    add("root_of_broadcast", |rank, ranks| vec![F32(Op::Broadcast { root: usize::from(rank + 1 == ranks) }, 10_007)]);
    add("root_of_reduce", |rank, ranks| {
        vec![F32(Op::Reduce { root: usize::from(rank + 1 == ranks), op: SUM }, 10_007)]
    });
    add("order", |rank, ranks| {
        let (first, second) = (F32(Op::AllReduce(SUM), 10), F32(Op::AllReduce(SUM), 1000));
        if rank + 1 == ranks { vec![second, first] } else { vec![first, second] }
    });
    add("one_left_out", |rank, ranks| {
        let skipped = rank + 1 == ranks;
        let first = (!skipped).then_some(F32(Op::AllReduce(SUM), 10));
        first.into_iter().chain([F32(Op::Broadcast { root: 0 }, 10)]).collect()
    });
    add("message_count", |rank, _| match rank {
        0 => vec![F32(Op::Send { to: 1 }, 10)],
        1 => vec![F32(Op::Recv { from: 0 }, 9)],
        _ => vec![],
    });
    add("message_type", |rank, _| match rank {
        0 => vec![F32(Op::Send { to: 1 }, 10_007)],
        1 => vec![I32(Op::Recv { from: 0 }, 10_007)],
        _ => vec![],
    });
    add("message_for_a_collective", |rank, _| match rank {
        0 => vec![F32(Op::Send { to: 1 }, 10)],
        _ => vec![F32(Op::AllReduce(SUM), 10)],
    });
    cases.push(Case::fresh("mismatch/parent_for_child", 2, |communicator| {
        let child = match communicator.split(Some(0), 0) {
            Ok(Some(child)) => child,
            Ok(None) => return failed("split gave no communicator"),
            // The others were faster.
            Err(error) => return check_mismatch(&error),
        };
        let within = if communicator.rank() + 1 == communicator.world_size() { &child } else { communicator };
        mismatch_within(communicator, within, vec![F32(Op::AllReduce(SUM), 10_007)], Mode::Blocking)
    }));
}

fn mismatch(communicator: &Arc<dyn Communicator>, calls: Vec<MismatchedCall>, mode: Mode) -> CaseResult {
    mismatch_within(communicator, communicator, calls, mode)
}

/// Makes the calls, then a barrier, and expects the first error among them to be a mismatch that names both sides.
fn mismatch_within(
    communicator: &Arc<dyn Communicator>,
    within: &Arc<dyn Communicator>,
    calls: Vec<MismatchedCall>,
    mode: Mode,
) -> CaseResult {
    let began = Instant::now();
    let mut handles = Vec::new();
    for wrong in calls {
        let (op, buffer) = match wrong {
            MismatchedCall::F32(op, count) => (op, Buffer::from_vec(vec![1f32; count])),
            MismatchedCall::I32(op, count) => (op, Buffer::from_vec(vec![1i32; count])),
        };
        handles.push(within.start(call(op, buffer, 0, mode)));
    }
    let first = handles.into_iter().find_map(|handle| handle.wait().err().map(|failed| failed.error));
    // A call that needs nothing from the others may have ended well: then the next one reports it.
    let error = match first {
        Some(error) => error,
        None => failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?,
    };
    check_mismatch(&error)?;
    on_time(began)
}

fn check_mismatch(error: &Error) -> CaseResult {
    let Error::Mismatch { rank, ours, peer, theirs } = error else {
        return failed(format!("expected a mismatch, got: {error}"));
    };
    ensure(rank != peer && ours != theirs, || format!("a mismatch that does not tell two sides apart: {error}"))?;
    ensure(!ours.is_empty() && !theirs.is_empty(), || format!("a mismatch that does not name both calls: {error}"))
}

// ------------------------------------------------------------------------------------------------------------------ timeouts

fn add_timeouts(cases: &mut Vec<Case>) {
    let mut add = |name: &str, op: fn(usize) -> Op, mode: Mode| {
        cases.push(Case::fresh(format!("timeout/{name}"), 2, move |communicator| {
            timeout(communicator, op(communicator.world_size()), mode)
        }));
    };
    add("all_reduce", |_| Op::AllReduce(SUM), Mode::Blocking);
    add("broadcast_without_root", |ranks| Op::Broadcast { root: ranks - 1 }, Mode::Blocking);
    add("receive", |ranks| Op::Recv { from: ranks - 1 }, Mode::Blocking);
    add("background_all_reduce", |_| Op::AllReduce(SUM), Mode::Background);
    cases.push(Case::fresh("timeout/barrier_of_a_child", 2, |communicator| {
        let Some(child) = communicator.split(Some(0), 0)? else {
            return failed("split gave no communicator");
        };
        timeout_within(communicator, &child, Op::Barrier, 0, Mode::Blocking)
    }));
    cases.push(Case::fresh("timeout/queued_behind_a_late_one", 2, queued));
    cases.push(Case::fresh("timeout/queued_behind_a_longer_one", 2, |communicator| {
        behind_a_longer_one(communicator, |short| communicator.start(Call { mode: Mode::Background, ..short }).wait())
    }));
    cases.push(Case::fresh("timeout/blocking_behind_a_longer_one", 2, |communicator| {
        behind_a_longer_one(communicator, |short| communicator.start(short).wait())
    }));
    cases.push(Case::fresh("timeout/borrowed_behind_a_longer_one", 2, |communicator| {
        behind_a_longer_one(communicator, |short| {
            let began = Instant::now();
            let Buffer::Host(mut buffer) = short.buffer else { return communicator.start(short).wait() };
            let borrowed = BorrowedCall { timeout: short.timeout, ..BorrowedCall::new(short.op, buffer.view_mut()) };
            let outcome = communicator.run_borrowed(borrowed);
            let (buffer, ended) = (Buffer::Host(buffer), Instant::now());
            match outcome {
                Ok(()) => Ok(Completed { buffer, input: None, began, ended }),
                Err(error) => Err(Failed { error, buffer: Some(buffer), input: None }),
            }
        })
    }));
    cases.push(Case::fresh("timeout/zero", 2, |communicator| {
        if communicator.rank() > 0 {
            return late(communicator);
        }
        let began = Instant::now();
        let error = failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], Duration::ZERO))?;
        check_timeout(&error, Duration::ZERO)?;
        on_time(began)
    }));
}

fn timeout(communicator: &Arc<dyn Communicator>, op: Op, mode: Mode) -> CaseResult {
    timeout_within(communicator, communicator, op, 10_007, mode)
}

/// The last rank never calls `op`. The others give up at the deadline; the last rank learns of it.
fn timeout_within(
    communicator: &Arc<dyn Communicator>,
    within: &Arc<dyn Communicator>,
    op: Op,
    count: usize,
    mode: Mode,
) -> CaseResult {
    if communicator.rank() + 1 == communicator.world_size() {
        return late(communicator);
    }
    let began = Instant::now();
    let buffer = Buffer::from_vec(vec![1f32; count]);
    let call = Call { mode, ..Call::blocking(op, buffer).with_timeout(SHORT) };
    let error = failure(within.start(call).wait())?;
    check_timeout(&error, SHORT)?;
    on_time(began)?;
    afterwards(communicator, &error)
}

/// Takes no part until the others have given up, then learns why. The job's failure ends what waits on another lane, too.
fn late(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let began = Instant::now();
    match communicator.lanes() {
        1 => thread::sleep(4 * SHORT),
        lanes => {
            let never_sent = call(Op::Recv { from: 0 }, Buffer::from_vec(vec![0u8]), lanes - 1, Mode::Background);
            check_timeout(&failure(communicator.start(never_sent).wait())?, Duration::ZERO)?;
        }
    }
    let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
    check_timeout(&error, Duration::ZERO)?;
    on_time(began)
}

/// Several operations wait behind one that is late: all fail with the same error, at once.
fn queued(communicator: &Arc<dyn Communicator>) -> CaseResult {
    if communicator.rank() + 1 == communicator.world_size() {
        return late(communicator);
    }
    let began = Instant::now();
    let mut handles = Vec::new();
    for index in 0..5 {
        let buffer = Buffer::from_vec(vec![1f32; 10_007]);
        let timeout = if index == 0 { SHORT } else { TIMEOUT };
        handles.push(communicator.start(Call::background(Op::AllReduce(SUM), buffer, 0).with_timeout(timeout)));
    }
    for handle in handles {
        check_timeout(&failure(handle.wait())?, SHORT)?;
    }
    on_time(began)
}

/// An operation with a short deadline waits for its turn behind one that has all the time of the world: it ends in its own time, and with
/// it the job, whose error names it.
fn behind_a_longer_one(communicator: &Arc<dyn Communicator>, short: impl FnOnce(Call) -> Outcome) -> CaseResult {
    if communicator.rank() + 1 == communicator.world_size() {
        return late(communicator);
    }
    let began = Instant::now();
    let long = call(Op::AllReduce(SUM), Buffer::from_vec(vec![1f32; 10_007]), 0, Mode::Background);
    let long = communicator.start(long);
    let op = Op::Broadcast { root: 0 };
    let error = failure(short(Call::blocking(op, Buffer::from_vec(vec![1f32; 10])).with_timeout(SHORT)))?;
    check_timeout(&error, SHORT)?;
    on_time(began)?;
    let Error::Timeout { operation, .. } = &error else { return Ok(()) };
    ensure(operation.contains("broadcast"), || format!("expected an error that names the broadcast, got: {error}"))?;
    check_timeout(&failure(long.wait())?, SHORT)?;
    on_time(began)?;
    afterwards(communicator, &error)
}

/// Whether this is a timeout after a wait of at least `least`, less what the caller did of it before the operation began.
fn check_timeout(error: &Error, least: Duration) -> CaseResult {
    match error {
        Error::Timeout { operation, waited, .. } => {
            ensure(!operation.is_empty(), || format!("a timeout that does not say of what: {error}"))?;
            ensure(*waited >= least / 2, || format!("gave up after {waited:?} of {least:?}"))
        }
        other => failed(format!("expected a timeout, got: {other}")),
    }
}

// -------------------------------------------------------------------------------------------------------------------- aborts

fn add_aborts(cases: &mut Vec<Case>) {
    cases.push(Case::fresh("abort/wakes_blocking_calls", 2, |communicator| wakes(communicator, Mode::Blocking)));
    cases.push(Case::fresh("abort/wakes_background_calls", 2, |communicator| wakes(communicator, Mode::Background)));
    cases.push(Case::fresh("abort/reaches_idle_ranks", 2, |communicator| {
        let last = communicator.world_size() - 1;
        if communicator.rank() == last {
            aborts_at_once(communicator, "no more")?;
        }
        let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
        check_aborted(&error, last, "no more")
    }));
    cases.push(Case::fresh("abort/everything_later_fails", 1, everything_later_fails));
    cases.push(Case::fresh("abort/the_first_reason_stays", 1, |communicator| {
        if communicator.rank() > 0 {
            let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
            check_aborted(&error, 0, "the first")?;
        } else {
            aborts_at_once(communicator, "the first")?;
        }
        communicator.abort("the second");
        let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
        check_aborted(&error, 0, "the first")
    }));
    cases.push(Case::fresh("abort/of_a_child_ends_the_job", 1, |communicator| {
        let child = match communicator.split(Some(0), -(communicator.rank() as i64)) {
            Ok(Some(child)) => child,
            Ok(None) => return failed("split gave no communicator"),
            // The abort was faster.
            Err(error) => return check_aborted(&error, 0, "in the child"),
        };
        if communicator.rank() == 0 {
            aborts_at_once(&child, "in the child")?;
        }
        let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
        check_aborted(&error, 0, "in the child")
    }));
    cases.push(Case::fresh("abort/two_communicators_in_flight", 2, two_in_flight));
    cases.push(Case::fresh("abort/by_all_at_once", 1, |communicator| {
        let began = Instant::now();
        aborts_at_once(communicator, "everyone")?;
        let error = failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], TIMEOUT))?;
        match &error {
            Error::Aborted { reason, .. } if reason == "everyone" => on_time(began),
            other => failed(format!("expected the abort, got: {other}")),
        }
    }));
}

/// Every rank waits for a message that never comes; another thread of rank 0 aborts.
fn wakes(communicator: &Arc<dyn Communicator>, mode: Mode) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let began = Instant::now();
    let aborting = (rank == 0).then(|| {
        let communicator = communicator.clone();
        thread::spawn(move || {
            thread::sleep(SHORT / 3);
            aborts_at_once(&communicator, "enough of it")
        })
    });
    let from = (rank + ranks - 1) % ranks;
    let lanes = if mode == Mode::Background { communicator.lanes() } else { 1 };
    let handles: Vec<_> = (0..lanes)
        .map(|lane| communicator.start(call(Op::Recv { from }, Buffer::from_vec(vec![0f32; 1000]), lane, mode)))
        .collect();
    for handle in handles {
        check_aborted(&failure(handle.wait())?, 0, "enough of it")?;
    }
    if let Some(aborting) = aborting {
        aborting.join().unwrap_or_else(|_| failed("the thread that aborts panicked"))?;
    }
    on_time(began)
}

fn everything_later_fails(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    if rank == 0 {
        aborts_at_once(communicator, "over")?;
    }
    let error = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
    check_aborted(&error, 0, "over")?;
    let began = Instant::now();
    for mode in [Mode::Blocking, Mode::Background] {
        for lane in 0..communicator.lanes() {
            for op in [Op::AllReduce(SUM), Op::Broadcast { root: ranks - 1 }, Op::AllGather] {
                let values = Pattern::<f32>::of_rank(1, rank, ranks).take(0, 100);
                let call = call(op, Buffer::from_vec(values.clone()), lane, mode);
                let Err(after) = communicator.start(call).wait() else {
                    return failed(format!("{op:?} went on after the abort"));
                };
                check_aborted(&after.error, 0, "over")?;
                match after.buffer {
                    None => return failed(format!("{op:?} after the abort: the buffer was not given back")),
                    Some(buffer) => check(&buffer.into_vec::<f32>()?, &values, format_args!("the buffer"))?,
                }
            }
        }
    }
    match communicator.split(Some(0), 0) {
        Ok(_) => return failed("split went on after the abort"),
        Err(error) => check_aborted(&error, 0, "over")?,
    }
    match communicator.finish(TIMEOUT) {
        Ok(()) => return failed("finish reported nothing of the abort"),
        Err(error) => check_aborted(&error, 0, "over")?,
    }
    on_time(began)
}

/// Operations of a communicator and of one that was split off it are under way on lanes of their own when two threads abort both.
fn two_in_flight(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, lanes) = (communicator.rank(), communicator.world_size(), communicator.lanes());
    let Some(child) = communicator.split(Some(0), 0)? else {
        return failed("split gave no communicator");
    };
    let began = Instant::now();
    let from = (rank + ranks - 1) % ranks;
    let receive = |within: &Arc<dyn Communicator>, lane: usize| {
        within.start(call(Op::Recv { from }, Buffer::from_vec(vec![0f32; 1000]), lane, Mode::Background))
    };
    let handles = [receive(communicator, 0), receive(&child, lanes - 1)];
    if rank == 0 {
        thread::sleep(SHORT / 3);
        let aborting =
            [communicator.clone(), child.clone()].map(|within| thread::spawn(move || aborts_at_once(&within, "both")));
        for thread in aborting {
            thread.join().unwrap_or_else(|_| failed("a thread that aborts panicked"))?;
        }
    }
    for handle in handles {
        check_aborted(&failure(handle.wait())?, 0, "both")?;
    }
    on_time(began)
}

/// Aborts, and checks that this does not block.
fn aborts_at_once(communicator: &Arc<dyn Communicator>, reason: &str) -> CaseResult {
    let began = Instant::now();
    communicator.abort(reason);
    ensure(began.elapsed() < SLACK / 3, || format!("abort() took {:?}", began.elapsed()))
}

fn check_aborted(error: &Error, by: usize, reason: &str) -> CaseResult {
    match error {
        Error::Aborted { by: rank, reason: text } => ensure(*rank == by && text == reason, || {
            format!("expected the abort by rank {by} ({reason}), got: {error}")
        }),
        other => failed(format!("expected the abort by rank {by}, got: {other}")),
    }
}

// ---------------------------------------------------------------------------------------------------------------- agreements

fn add_agreements(cases: &mut Vec<Case>) {
    cases.push(Case::agreed("abort/by_all_at_once_with_a_reason_each", 1, |communicator| {
        let rank = communicator.rank();
        aborts_at_once(communicator, &format!("the reason of rank {rank}"))?;
        let first = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
        match &first {
            Error::Aborted { by, reason } if *reason == format!("the reason of rank {by}") => {}
            other => return failed(format!("expected one of the aborts, got: {other}")),
        }
        one_answer(communicator, &first)
    }));
    cases.push(Case::agreed("mismatch/beside_a_call_that_waits", 2, |communicator| {
        need_lanes(communicator, 2)?;
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let (from, last) = ((rank + 1) % ranks, communicator.lanes() - 1);
        let waiting = call(Op::Recv { from }, Buffer::from_vec(vec![0f32; 3]), last, Mode::Background);
        let waiting = communicator.start(waiting);
        let counts = Buffer::from_vec(vec![1f32; if rank + 1 == ranks { 11 } else { 10 }]);
        let wrong = communicator.start(call(Op::AllReduce(SUM), counts, 0, Mode::Background));
        // A call that needs nothing from the others may have ended well.
        if let Err(error) = wrong.wait() {
            one_text(&error.error, &failure(waiting.wait())?)?;
        } else {
            failure(waiting.wait())?;
        }
        let first = failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?;
        check_mismatch(&first)?;
        one_answer(communicator, &first)
    }));
    cases.push(Case::agreed("timeout/of_all_but_one_at_once", 2, |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let first = if rank + 1 == ranks {
            thread::sleep(4 * SHORT);
            failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?
        } else {
            failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], SHORT))?
        };
        check_timeout(&first, Duration::ZERO)?;
        one_answer(communicator, &first)
    }));
    cases.push(Case::agreed("abort/while_others_time_out", 2, |communicator| {
        let first = if communicator.rank() == 0 {
            thread::sleep(SHORT);
            aborts_at_once(communicator, "at the deadline of the others")?;
            failure(finished(communicator, Op::Barrier, Vec::<u8>::new(), TIMEOUT))?
        } else {
            failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], SHORT))?
        };
        one_answer(communicator, &first)
    }));
}

/// Whether everything that this rank asks for from now on gets the answer that it has had; that answer.
fn one_answer(communicator: &Arc<dyn Communicator>, first: &Error) -> Step<String> {
    // Rank 0's word, if it came later than the first answer, has come by the second look.
    for look in 0..2 {
        for lane in 0..communicator.lanes() {
            for mode in [Mode::Blocking, Mode::Background] {
                let call = call(Op::AllReduce(SUM), Buffer::from_vec(vec![1f32; 10]), lane, mode);
                one_text(first, &failure(communicator.start(call).wait())?)?;
            }
        }
        if look == 0 {
            thread::sleep(SHORT);
        }
    }
    match communicator.split(Some(0), 0) {
        Ok(_) => return failed("split went on after the failure"),
        Err(error) => one_text(first, &error)?,
    }
    match communicator.finish(TIMEOUT) {
        Ok(()) => return failed("finish reported nothing of the failure"),
        Err(error) => one_text(first, &error)?,
    }
    Ok(first.to_string())
}

fn one_text(first: &Error, later: &Error) -> CaseResult {
    ensure(first.to_string() == later.to_string(), || format!("first \"{first}\", later \"{later}\""))
}

// ------------------------------------------------------------------------------------------------------------------ finishes

fn add_finishes(cases: &mut Vec<Case>) {
    cases.push(Case::fresh("finish/nothing_was_done", 1, |communicator| Ok(communicator.finish(TIMEOUT)?)));
    cases.push(Case::fresh("finish/nothing_starts_afterwards", 1, |communicator| {
        barrier(communicator)?;
        communicator.finish(TIMEOUT)?;
        let began = Instant::now();
        failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], TIMEOUT))?;
        communicator.finish(TIMEOUT)?;
        on_time(began)
    }));
    cases.push(Case::fresh("finish/delivers_what_was_sent", 2, delivers));
    cases.push(Case::fresh("finish/waits_for_background_calls", 1, waits_for_background));
    cases.push(Case::fresh("finish/reports_what_no_call_has", 2, reports));
    cases.push(Case::fresh("finish/times_out_when_a_rank_stays", 2, |communicator| {
        if communicator.rank() + 1 == communicator.world_size() {
            return Ok(());
        }
        let began = Instant::now();
        match communicator.finish(SHORT) {
            Ok(()) => return failed("finish did not wait for the last rank"),
            Err(error) => check_timeout(&error, SHORT)?,
        }
        on_time(began)
    }));
}

/// Rank 0 sends to everyone and finishes at once; the others take their time.
fn delivers(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, count) = (communicator.rank(), communicator.world_size(), 300_007);
    let pattern = Pattern::<f32>::of_rank(41, 0, ranks);
    if rank == 0 {
        for to in 1..ranks {
            run(communicator, Op::Send { to }, pattern.take(to, count), CallMode::Blocking)?;
        }
    } else {
        thread::sleep(SHORT);
        let got = run(communicator, Op::Recv { from: 0 }, vec![0f32; count], CallMode::Blocking)?;
        pattern.check(&got, rank, format_args!("the message"))?;
    }
    communicator.finish(TIMEOUT)?;
    Ok(())
}

fn waits_for_background(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, lanes) = (communicator.rank(), communicator.world_size(), communicator.lanes());
    let reduced = Pattern::<i64>::reduction(42, SUM, ranks);
    let mut handles = Vec::new();
    for index in 0..3 * lanes {
        let buffer = Buffer::from_vec(Pattern::<i64>::of_rank(42, rank, ranks).take(index, 20_011));
        handles.push(communicator.start(call(Op::AllReduce(SUM), buffer, index % lanes, Mode::Background)));
    }
    communicator.finish(TIMEOUT)?;
    for (index, mut handle) in handles.into_iter().enumerate() {
        ensure(handle.test(), || format!("operation {index} was still running after finish"))?;
        let got = handle.wait()?.buffer.into_vec::<i64>()?;
        reduced.check(&got, index, format_args!("operation {index}"))?;
    }
    Ok(())
}

/// Rank 0 sends more than rank 1 receives. Its send may end well, so finish is what reports it.
fn reports(communicator: &Arc<dyn Communicator>) -> CaseResult {
    match communicator.rank() {
        0 => {
            let sent = finished(communicator, Op::Send { to: 1 }, vec![1f32; 10], TIMEOUT);
            // Unless the receiver was so fast that the send learns of it.
            sent.err().map_or(Ok(()), |early| check_mismatch(&early.error))?;
        }
        1 => {
            let error = failure(finished(communicator, Op::Recv { from: 0 }, vec![0f32; 5], TIMEOUT))?;
            check_mismatch(&error)?;
        }
        _ => {}
    }
    match communicator.finish(TIMEOUT) {
        Ok(()) => failed("finish reported nothing"),
        Err(Error::Mismatch { .. }) => Ok(()),
        Err(other) => failed(format!("expected finish to report the mismatch, got: {other}")),
    }
}

// ------------------------------------------------------------------------------------------------------------------- helpers

fn finished<T: Element>(communicator: &Arc<dyn Communicator>, op: Op, values: Vec<T>, timeout: Duration) -> Outcome {
    let call = Call { timeout: Some(timeout), ..call(op, Buffer::from_vec(values), 0, Mode::Blocking) };
    communicator.start(call).wait()
}

/// The error of a call that must fail.
fn failure(outcome: Outcome) -> Step<Error> {
    match outcome {
        Ok(_) => failed("an operation ended well that could not"),
        Err(error) if matches!(error.error, Error::Unsupported { .. }) => Err(error.into()),
        Err(error) => Ok(error.error),
    }
}

/// The job's failure is the answer to everything that follows.
fn afterwards(communicator: &Arc<dyn Communicator>, first: &Error) -> CaseResult {
    let began = Instant::now();
    let error = failure(finished(communicator, Op::AllReduce(SUM), vec![1f32; 10], TIMEOUT))?;
    ensure(std::mem::discriminant(&error) == std::mem::discriminant(first), || {
        format!("after \"{first}\" the next operation failed with \"{error}\"")
    })?;
    on_time(began)
}

/// Whether what began then has not taken much longer than the shortest deadline.
fn on_time(began: Instant) -> CaseResult {
    let took = began.elapsed();
    ensure(took <= SHORT + SLACK, || format!("took {took:?} to notice, more than {:?}", SHORT + SLACK))
}
