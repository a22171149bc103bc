//! An engine that fails in every way.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::buffer::DeviceMemory;
use crate::collectives::CommunicatorExt;
use crate::control::Control;
use crate::dtype::{DType, ReduceOp};
use crate::engine::Settings;
use crate::local::{self, LocalControl};
use crate::table::Table;

/// Panics in every all-reduce. What it has begun ends only if `settles`.
struct Panicking {
    shared: JobState<()>,
    settles: AtomicBool,
}

impl Engine for Panicking {
    type Lane = ();
    type GroupState = ();

    fn name(&self) -> &str {
        "panicking"
    }

    fn shared(&self) -> &JobState<()> {
        &self.shared
    }

    fn accept(&self, _op: &Op, _extents: &Extents, _data: &mut Data<'_>) -> Result<()> {
        Ok(())
    }

    fn perform(&self, operation: &Operation, (): &(), (): &mut (), _data: Data<'_>) -> Result<()> {
        match operation.op {
            Op::AllReduce(_) => panic!("on purpose"),
            Op::Reduce { .. } => Err(Error::Internal("not on this engine".into())),
            _ => Ok(()),
        }
    }

    fn has_settled(&self, (): &()) -> bool {
        self.settles.load(Ordering::SeqCst)
    }

    fn split(_parent: &Comm<Self>, group: Option<&Group>) -> Result<Option<()>> {
        Ok(group.map(|_| ()))
    }

    fn end(self: &Arc<Self>, _failure: &Error) {}

    fn close(self: &Arc<Self>, (): &(), _deadline: Deadline) -> Result<()> {
        Ok(())
    }
}

/// Counts how often it is freed.
#[derive(Debug)]
struct Memory(Arc<AtomicUsize>);

impl DeviceMemory for Memory {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn count(&self) -> usize {
        4
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Two ranks, and how often memory made by the second value was freed.
fn ranks(settles: bool) -> Vec<(Comm<Panicking>, Arc<LocalControl>)> {
    let comm = |rank: local::LocalRank| {
        let second = Duration::from_secs(1);
        let settings =
            Settings { timeout: 20 * second, stall_after: 20 * second, verdict_grace: second, table: Table::fixed() };
        let shared = JobState::new(rank.control.clone(), vec![()], settings);
        (Comm::first(Arc::new(Panicking { shared, settles: AtomicBool::new(settles) }), ()), rank.control)
    };
    local::group(2, 1).into_iter().map(comm).collect()
}

const SUM: Op = Op::AllReduce(ReduceOp::Sum);

#[test]
fn a_panic_in_an_operation_ends_the_job_and_frees_nothing_that_may_be_in_use() {
    for settles in [true, false] {
        for mode in [Mode::Blocking, Mode::Background] {
            let (both, freed) = (ranks(settles), Arc::new(AtomicUsize::new(0)));
            let memory = || Buffer::Device(Box::new(Memory(freed.clone())));
            let call = Call { mode, ..Call::blocking(SUM, memory()).out_of_place(memory()) };
            match mode {
                Mode::Blocking => {
                    let panic = catch_unwind(AssertUnwindSafe(|| both[1].0.start(call))).unwrap_err();
                    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
                }
                Mode::Background => {
                    let failed = both[1].0.start(call).wait().unwrap_err();
                    assert!(failed.error.to_string().contains("ended without a result"), "{}", failed.error);
                }
            }
            assert_eq!(freed.load(Ordering::SeqCst), if settles { 2 } else { 0 }, "{mode:?}");
            for (comm, control) in &both {
                let failure = control.failure().unwrap().to_string();
                assert!(failure.contains("all-reduce") && failure.contains("panicked on rank 1"), "{failure}");
                assert_eq!(comm.barrier().unwrap_err().to_string(), failure);
            }
        }
    }
}

#[test]
fn a_panic_on_lent_memory_reaches_its_caller() {
    let both = ranks(true);
    let panic = catch_unwind(AssertUnwindSafe(|| both[0].0.all_reduce(&mut [1f32], ReduceOp::Sum))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(both[1].0.barrier().unwrap_err().to_string().contains("panicked on rank 0"));
}

#[test]
fn memory_of_an_operation_that_failed_comes_back_once_nothing_uses_it() {
    for settles in [true, false] {
        let (both, freed) = (ranks(settles), Arc::new(AtomicUsize::new(0)));
        let reduce = Op::Reduce { root: 0, op: ReduceOp::Sum };
        let call = Call::blocking(reduce, Buffer::Device(Box::new(Memory(freed.clone()))));
        let failed = both[0].0.start(call.out_of_place(Buffer::from_vec(vec![1f32; 4]))).wait().unwrap_err();
        assert!(failed.error.to_string().contains("not on this engine"), "{}", failed.error);
        assert!(failed.input.is_some());
        assert_eq!(failed.buffer.is_some(), settles);
        drop(failed);
        assert_eq!(freed.load(Ordering::SeqCst), usize::from(settles));
    }
}
