//! Hand-overs of one tensor, which is shared, opened, released and freed.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::CudaContext;
use device_ipc::{Error, Export, LeaseState, MemoryUse, cuda};

use super::{ELEMENTS, Exporter};
use crate::TIMEOUT;
use crate::partner::Partner;

impl Exporter {
    pub(super) fn plain(&mut self) -> Result<()> {
        let buffer = self.new_tensor()?;
        self.stream.synchronize()?;
        let export = self.ipc.share(buffer).start()?;
        self.opened_by("open", &export)?;
        finish(export)
    }

    pub(super) fn ready(&mut self) -> Result<()> {
        let export = self.ready_tensor()?;
        self.opened_by("open", &export)?;
        finish(export)
    }

    pub(super) fn cudarc(&mut self) -> Result<()> {
        if self.default_stream.is_none() {
            cuda::make_pool_shareable(self.device)?;
            self.default_stream = Some(CudaContext::new(self.device as usize)?.default_stream());
        }
        let stream = self.default_stream.clone().context("it has just been made")?;
        let mut slice = stream.alloc_zeros::<f32>(ELEMENTS)?;
        stream.memcpy_htod(&[self.value(); ELEMENTS], &mut slice)?;
        let export = self.ipc.share(slice).ready_on(&stream).start()?;
        self.opened_by("cudarc", &export)?;
        finish(export)
    }

    pub(super) fn timeline(&mut self) -> Result<()> {
        let export = self.ipc.share(self.new_tensor()?).start()?;
        self.importer.send(&format!("timeline {} {}", self.value(), export.descriptor()))?;
        let timelines = export.timelines(1, TIMEOUT)?;
        let timeline = timelines.first().context("there is one")?;
        timeline.signal(1, &self.stream)?;
        timeline.wait(1, &self.stream)?;
        self.importer.answer()?;
        finish(export)
    }

    /// An export that is opened, idle, recalled in every second round, opened again, and ended while it is in use.
    pub(super) fn observe(&mut self) -> Result<()> {
        let buffer = self.new_tensor()?;
        self.stream.synchronize()?;
        let export = self.ipc.share(buffer).start()?;
        let (changed, changes) = channel();
        export.on_change(move || changed.send(()).unwrap_or_default());
        let check = |export: &Export, state, count| {
            let holders = export.holders();
            ensure!(holders.count(state) == count, "{count} holders were to be {state}: {holders}");
            Ok(())
        };
        self.opened_by("read", &export)?;
        check(&export, LeaseState::Idle, 1)?;
        let even = self.done.is_multiple_of(2);
        if even {
            export.recall();
            check(&export, LeaseState::Idle, 0)?;
        }
        self.opened_by("observe", &export)?;
        check(&export, LeaseState::InUse, 1)?;
        // Each returns once `on_dropped` has run in the importer, and releases the mapping.
        if even {
            drop(export);
            self.importer.ask("dropped")?;
        } else {
            let Err(failed) = export.close(Duration::ZERO) else {
                bail!("it was closed while it was in use")
            };
            self.importer.ask("dropped")?;
            failed.into_inner().close(TIMEOUT)?;
        }
        changes.recv_timeout(TIMEOUT).context("no change of the holders was reported")
    }

    pub(super) fn staged(&mut self) -> Result<()> {
        let export = self.ready_tensor()?;
        self.opened_by("staged", &export)?;
        finish(export)
    }

    /// The importer maps the new memory at the address of the last round's, which ends then.
    pub(super) fn replaced(&mut self) -> Result<()> {
        let buffer = self.new_tensor_for(MemoryUse::new().remappable())?;
        self.stream.synchronize()?;
        let export: Arc<Export> = self.ipc.share(buffer).start()?.into();
        let name = format!("soak-{}", std::process::id());
        let command = format!("replace {} {name} {}", self.value(), export.descriptor());
        let mut former = None;
        match &self.keeper {
            Some(keeper) => former = Arc::into_inner(keeper.replace(self.done, export)),
            None => {
                self.keeper = Some(self.ipc.keep(&name, self.done, export).map_err(Error::from)?);
            }
        }
        self.importer.send(&command)?;
        self.importer.answer()?;
        former.map_or(Ok(()), finish)
    }

    /// Every `kill_every` rounds the importer is killed while it has the memory open, and another takes its place.
    pub(super) fn killed(&mut self) -> Result<()> {
        let export = self.ready_tensor()?;
        if (self.done + 1).is_multiple_of(self.kill_every) {
            self.opened_by("hold", &export)?;
            self.importer = Partner::start(self.device)?;
            let died = export.wait_released(TIMEOUT);
            ensure!(
                matches!(died, Err(Error::HolderDied { .. })),
                "a killed importer is reported as {died:?}"
            );
            return Ok(export.close(TIMEOUT)?);
        }
        self.opened_by("open", &export)?;
        finish(export)
    }

    fn ready_tensor(&self) -> Result<Export> {
        Ok(self.ipc.share(self.new_tensor()?).ready_on(&self.stream).start()?)
    }

    fn opened_by(&mut self, command: &str, export: &Export) -> Result<()> {
        self.importer.ask(&format!("{command} {} {}", self.value(), export.descriptor()))?;
        Ok(())
    }
}

fn finish(export: Export) -> Result<()> {
    export.wait_released(TIMEOUT)?;
    Ok(export.close(TIMEOUT)?)
}
