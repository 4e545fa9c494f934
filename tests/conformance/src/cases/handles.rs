//! Handles of the bare backend between two processes: what an open returns, and what a close and an unexport give back.

use device_ipc_core::DeviceOrdinal;

use crate::bare::BareExport;
use crate::check::{refused_as_one_of, that};
use crate::flows::{for_each_kind};
use crate::unchecked::Bare;
use crate::usage::Usage;
use crate::{Context, Outcome, fail};

const FIRST: DeviceOrdinal = DeviceOrdinal::new(0);

/// Handles that are opened, or made, in a case that counts what is left. Above what a driver does once.
const MANY: usize = 24;

/// The length of an opened range is what the driver mapped, not what the peer claims.
pub fn opened_size_is_the_drivers(context: &Context) -> Outcome {
    let backend = &**context.backend();
    for_each_kind(context, |kind| {
        let memory = Bare::allocate_as(backend, FIRST, 1 << 20, kind.kind)?;
        let export = BareExport::of(backend, &memory, Some(kind.kind))?;
        let mut importer = context.agent_inheriting(&export.handle().fds)?;
        importer.prepare(0)?;
        let honest = export.for_agent(&mut importer)?;
        let size = honest.size;
        for claimed in [size, 2 * size, size / 2, 1, u64::MAX] {
            let mut handle = honest.clone();
            handle.size = claimed;
            match importer.bare_open(handle, 0)? {
                Ok((len, _)) => that(
                    len == size,
                    format!(
                        "open returned a range of {len} bytes for an allocation of {size} bytes whose exporter claims \
                         {claimed}: Opened::range has to have the length that the driver mapped; ask the driver for it, \
                         or refuse a ReceivedHandle::size that the driver does not confirm"
                    ),
                )?,
                // To refuse a lie is right as well; to refuse the truth is not.
                Err(refusal) => that(claimed != size, format!("an honest handle was refused: {}", refusal.text))?,
            }
        }
        export.withdraw()
    })
}

/// Memory that was opened from another process has no extents: it cannot be exported again.
pub fn opened_memory_has_no_extents(context: &Context) -> Outcome {
    let backend = &**context.backend();
    for_each_kind(context, |kind| {
        let memory = Bare::allocate_as(backend, FIRST, 1 << 16, kind.kind)?;
        let export = BareExport::of(backend, &memory, Some(kind.kind))?;
        let mut importer = context.agent_inheriting(&export.handle().fds)?;
        let handle = export.for_agent(&mut importer)?;
        match importer.bare_open(handle, 0)? {
            Ok((_, Ok(extents))) => fail(format!(
                "extents_of named {extents} extents for memory that was opened from another process: it has to refuse \
                 with SharedOn, or with NotShareable where the vendor cannot tell why the memory has no handle"
            )),
            Ok((_, Err(refusal))) => {
                let what = "extents_of for memory that was opened from another process";
                refused_as_one_of(Err::<(), _>(refusal), what, &["SharedOn", "NotShareable"], &[])
            }
            Err(refusal) => fail(format!("an honest handle was refused: {}", refusal.text)),
        }
    })
}

/// A close releases everything that the open acquired: mappings of the host, and descriptors.
pub fn close_leaves_nothing_behind(context: &Context) -> Outcome {
    let backend = &**context.backend();
    for_each_kind(context, |kind| {
        let memories = (0..MANY + 1).map(|_| Bare::allocate_as(backend, FIRST, 1 << 16, kind.kind));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        let exports = memories.iter().map(|memory| BareExport::of(backend, memory, Some(kind.kind)));
        let exports = exports.collect::<Result<Vec<_>, _>>()?;
        let descriptors: Vec<_> = exports.iter().flat_map(|export| &export.handle().fds).collect();
        let mut importer = context.agent_inheriting(&descriptors)?;
        importer.prepare(0)?;
        let handles = exports.iter().map(|export| export.for_agent(&mut importer));
        let mut handles = handles.collect::<Result<Vec<_>, _>>()?.into_iter();
        let mut open = |handle| match importer.bare_open(handle, 0)? {
            Ok(_) => importer.usage(),
            Err(refusal) => fail(format!("an honest handle was refused: {}", refusal.text)),
        };
        // A driver keeps some resources after the first open.
        let Some(before) = handles.next().map(&mut open).transpose()? else { return fail("there are handles") };
        let mut after = before;
        for handle in handles {
            after = open(handle)?;
        }
        nothing_left(
            before,
            after,
            "allocations were opened and closed one after the other",
            "DeviceIpc::close has to unmap the range and to close what open kept, ReceivedHandle::fds included",
        )
    })
}

/// Closing an exported handle releases everything that exporting it acquired.
pub fn unexport_leaves_nothing_behind(context: &Context) -> Outcome {
    let backend = &**context.backend();
    for_each_kind(context, |kind| {
        let memory = Bare::allocate_as(backend, FIRST, 1 << 16, kind.kind)?;
        BareExport::of(backend, &memory, Some(kind.kind))?.withdraw()?;
        let before = Usage::of_this_process()?;
        for _ in 0..MANY {
            BareExport::of(backend, &memory, Some(kind.kind))?.withdraw()?;
        }
        nothing_left(
            before,
            Usage::of_this_process()?,
            "handles were made and taken back",
            "DeviceIpc::unexport has to give back what export took and to drop Exported::fds",
        )
    })
}

fn nothing_left(before: Usage, after: Usage, happened: &str, remedy: &str) -> Outcome {
    let pairs = [
        ("mappings (/proc/self/maps)", before.mappings, after.mappings),
        ("file descriptors (/proc/self/fd)", before.descriptors, after.descriptors),
    ];
    for (what, before, after) in pairs {
        that(
            after < before + MANY,
            format!("the process had {before} {what}, and {after} after {MANY} {happened}: {remedy}"),
        )?;
    }
    Ok(())
}
