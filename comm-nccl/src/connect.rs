//! How ranks find each other: by the job's control plane, over which NCCL's own names travel.

use std::fs;
use std::sync::Arc;

use comm_core::control::ControlExt;
use comm_core::engine::{Comm, Engine as _};
use comm_core::{Control, Deadline, Error, Result};
use serde::{Deserialize, Serialize};

use crate::engine::{LaneComms, NcclEngine};
use crate::sys::{Device, Driver, Library, check_environment, may_share, version_text};
use crate::{NcclOptions, unsupported};

/// What each rank tells the others before they connect.
#[derive(Debug, Serialize, Deserialize)]
struct PeerInfo {
    /// Identifies its machine.
    machine: String,
    /// NCCL's code of the version.
    version: i32,
    lanes: usize,
    /// Of rank 0: the communicators' names.
    names: Vec<u8>,
}

/// Connects all ranks of `control`.
pub(crate) fn connect(
    control: Arc<dyn Control>,
    options: &NcclOptions,
    deadline: Deadline,
) -> Result<Comm<NcclEngine>> {
    if options.lanes == 0 {
        return Err(Error::invalid("a communicator needs at least one lane"));
    }
    let (rank, ranks) = (control.rank(), control.world_size());
    // A rank that has no NCCL says so, or the others would wait for it.
    let found = find(options);
    let peer_info = found.as_ref().map_err(Clone::clone).and_then(|(library, _)| {
        let names = if rank == 0 { LaneComms::names(library.table(), options.lanes)? } else { Vec::new() };
        Ok(PeerInfo { machine: machine(), version: library.version(), lanes: options.lanes, names })
    });
    let peer_infos = control.gather_all("nccl", "NCCL", peer_info, deadline)?;
    let (library, driver) = found?;
    let Some(first) = peer_infos.first() else { return Err(Error::Internal("a job without ranks".into())) };
    for (other, theirs) in peer_infos.iter().enumerate() {
        if (theirs.version, theirs.lanes) != (first.version, first.lanes) {
            return Err(Error::Rendezvous(format!(
                "rank 0 has NCCL {} and {} lanes, rank {other} has NCCL {} and {}; all ranks must have the same",
                version_text(first.version),
                first.lanes,
                version_text(theirs.version),
                theirs.lanes
            )));
        }
    }
    let mine = &peer_infos[rank].machine;
    let before = peer_infos[..rank].iter().filter(|theirs| theirs.machine == *mine).count();
    // With all that a rank needs of its own, so that what is missing is known before NCCL waits for it.
    let engine =
        open(driver, options, before).and_then(|device| NcclEngine::new(device, library, control.clone(), options));
    let uuid = engine.as_ref().map_err(Clone::clone).and_then(|engine| engine.device.uuid());
    let devices = control.gather_all("nccl device", "NCCL", uuid, deadline)?;
    let engine = engine?;
    if !(may_share() || options.may_share()) {
        refuse_shared(&devices)?;
    }

    Comm::first_with(engine, |engine| {
        let comms = LaneComms::join(engine, &first.names, rank, ranks, deadline)
            .map_err(|error| engine.fail(error, "connecting NCCL's communicators"))?;
        comms.warm_up(rank, ranks, deadline).map_err(|error| engine.fail(error, "warming NCCL up"))?;
        Ok(comms)
    })
}

/// NCCL and a driver with a device.
fn find(options: &NcclOptions) -> Result<(Library, Driver)> {
    check_environment()?;
    let (library, driver) = options.libraries()?;
    if driver.device_count()? == 0 {
        return Err(unsupported(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES and `nvidia-smi`".into(),
        ));
    }
    Ok((library, driver))
}

/// The device of the rank that comes after `before` others of its machine.
fn open(driver: Driver, options: &NcclOptions, before: usize) -> Result<Device> {
    let count = driver.device_count()?;
    let ordinal = options.device.unwrap_or(before % count.max(1));
    if ordinal >= count {
        return Err(Error::invalid(format!(
            "CUDA device {ordinal} does not exist: this process sees {count}, numbered from 0"
        )));
    }
    driver.device(ordinal)
}

/// NCCL takes one rank a device.
fn refuse_shared(devices: &[String]) -> Result<()> {
    for (rank, device) in devices.iter().enumerate() {
        if let Some(other) = devices[..rank].iter().position(|other| other == device) {
            return Err(unsupported(format!(
                "ranks {other} and {rank} have the same GPU ({device}), and NCCL allows one rank for each GPU; start fewer ranks, or for a \
                 test set {}=1",
                crate::SHARE_VARIABLE
            )));
        }
    }
    Ok(())
}

/// Identifies this machine: containers of one machine share its boot id, not their names.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).ok().filter(|text: &String| !text.trim().is_empty());
    let name = read("/proc/sys/kernel/random/boot_id").or_else(|| read("/proc/sys/kernel/hostname"));
    name.unwrap_or_default().trim().to_string()
}
