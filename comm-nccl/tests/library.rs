//! NCCL itself, on machines without a GPU: what can be called there, and what comes of the rest.
//!
//! Needs NCCL's library, as of the Python package `nvidia-nccl-cu13`: in an environment that is active, or named by `COMM_NCCL_LIB`.
//! Where there is none the tests say so and do nothing.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::{CommunicatorExt, Control, Deadline, Error, ReduceOp, local};
use comm_nccl::{Library, NcclCommunicator, NcclOptions, available};

/// The library, unless the test is to be skipped.
fn library() -> Option<Library> {
    Library::load().inspect_err(|error| println!("skipped: {error}")).ok()
}

#[test]
fn it_is_found_and_tells_its_version() {
    let Some(library) = library() else { return };
    println!("NCCL {} at {}", library.version_text(), library.path().display());
    assert!(library.version() >= 21_800);
    assert!(library.version_text().starts_with("2."));
}

#[test]
fn without_a_gpu_it_is_not_available_and_the_reason_says_why() {
    if library().is_none() {
        return;
    }
    match available() {
        Ok(()) => println!("skipped: this machine has a GPU"),
        Err(error) => {
            let text = error.to_string();
            assert!(matches!(error, Error::Unsupported { .. }), "{text}");
            assert!(text.contains("driver") && text.contains("shm"), "{text}");
        }
    }
}

/// NCCL takes the configuration and the unique id, and then finds no GPU: every rank gets that as an error, at once.
#[test]
fn where_it_finds_no_gpu_every_rank_gets_its_error() {
    if library().is_none() || available().is_ok() {
        println!("skipped: NCCL is not here, or this machine has a GPU");
        return;
    }
    for ranks in [1, 2] {
        let began = Instant::now();
        let threads: Vec<_> = local::group(ranks, 2)
            .into_iter()
            .map(|rank| {
                thread::spawn(move || {
                    let control: Arc<dyn Control> = rank.control;
                    let options = NcclOptions::default().on_stand_in_driver();
                    NcclCommunicator::connect(control, &options, Deadline::after(Duration::from_secs(60))).unwrap_err()
                })
            })
            .collect();
        for thread in threads {
            let text = thread.join().unwrap().to_string();
            println!("{text}");
            assert!(text.contains("NCCL") && text.contains("NCCL_DEBUG"), "{text}");
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}

/// A rank that has no GPU tells the others, which do not wait for it.
#[test]
fn a_rank_without_nccl_is_named_on_all() {
    let threads: Vec<_> = local::group(3, 1)
        .into_iter()
        .enumerate()
        .map(|(number, rank)| {
            thread::spawn(move || {
                let control: Arc<dyn Control> = rank.control;
                let options = NcclOptions::default().with_lanes(1).on_stand_in();
                // There is no such device.
                let options = if number == 1 { options.with_device(Some(5)) } else { options };
                NcclCommunicator::connect(control, &options, Deadline::after(Duration::from_secs(20))).unwrap_err()
            })
        })
        .collect();
    let texts: Vec<String> = threads.into_iter().map(|thread| thread.join().unwrap().to_string()).collect();
    assert!(texts[1].contains("CUDA device 5 does not exist"), "{}", texts[1]);
    for text in [&texts[0], &texts[2]] {
        assert!(text.contains("rank 1") && text.contains("CUDA device 5 does not exist"), "{text}");
    }
}

/// Ranks with different settings are told apart before NCCL sees them.
#[test]
fn ranks_with_other_lanes_are_refused() {
    let threads: Vec<_> = local::group(2, 1)
        .into_iter()
        .enumerate()
        .map(|(number, rank)| {
            thread::spawn(move || {
                let control: Arc<dyn Control> = rank.control;
                let options = NcclOptions::default().with_lanes(1 + number).on_stand_in();
                NcclCommunicator::connect(control, &options, Deadline::after(Duration::from_secs(20))).unwrap_err()
            })
        })
        .collect();
    for thread in threads {
        let error = thread.join().unwrap();
        assert!(matches!(error, Error::Rendezvous(_)), "{error}");
    }
}

/// Buffers of the device are worked on where they are, and come back.
#[test]
fn device_memory_is_reduced_in_place() {
    use comm_core::{Buffer, Call, Communicator, DType, Op};
    use comm_nccl::CudaBuffer;

    let threads: Vec<_> = local::group(2, 2)
        .into_iter()
        .map(|rank| {
            thread::spawn(move || {
                let control: Arc<dyn Control> = rank.control;
                let options = NcclOptions::default().on_stand_in();
                let comm =
                    NcclCommunicator::connect(control, &options, Deadline::after(Duration::from_secs(20))).unwrap();
                let mine = vec![comm.rank() as f32 + 1.0; 1000];
                let device = comm.device().clone();
                for lane in 0..2 {
                    let memory = device.buffer(DType::F32, bytemuck::cast_slice(&mine)).unwrap();
                    let address = memory.pointer();
                    let call = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::Device(Box::new(memory)), lane);
                    let Buffer::Device(mut back) = comm.start(call).wait().unwrap().buffer else { panic!() };
                    let back = back.as_any_mut().downcast_mut::<CudaBuffer>().unwrap();
                    assert_eq!(back.pointer(), address);
                    let values: Vec<f32> = bytemuck::pod_collect_to_vec(&device.read(back).unwrap());
                    assert_eq!(values, [3.0; 1000]);
                }
                assert_eq!(comm.all_reduce_scalar(1i32, ReduceOp::Sum).unwrap(), 2);
                comm.finish(Duration::from_secs(20)).unwrap();
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// An abort ends what runs on every lane, and then the memory of the device comes back: nothing may still write there.
#[test]
fn an_abort_gives_device_memory_back() {
    use comm_core::{Buffer, Call, Communicator, DType, Op};

    let threads: Vec<_> = local::group(2, 2)
        .into_iter()
        .map(|rank| {
            thread::spawn(move || {
                let control: Arc<dyn Control> = rank.control;
                let options = NcclOptions::default().on_stand_in();
                let comm =
                    NcclCommunicator::connect(control, &options, Deadline::after(Duration::from_secs(20))).unwrap();
                let device = comm.device().clone();
                let receive = |lane: usize| {
                    let memory = device.buffer(DType::F32, &[0; 4000]).unwrap();
                    let op = Op::Recv { from: 1 - comm.rank() };
                    comm.start(Call::background(op, Buffer::Device(Box::new(memory)), lane))
                };
                let handles = [receive(0), receive(1)];
                thread::sleep(Duration::from_millis(100));
                if comm.rank() == 0 {
                    comm.abort("enough");
                }
                let began = Instant::now();
                for handle in handles {
                    let failed = handle.wait().unwrap_err();
                    assert!(matches!(failed.error, Error::Aborted { by: 0, .. }), "{}", failed.error);
                    assert!(failed.buffer.is_some(), "the memory is lost");
                }
                assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
