//! Hand-overs of one tensor, which is shared, opened, released and freed.

use anyhow::{Context, Result};
use cudarc::driver::CudaContext;
use device_ipc::{Export, cuda};

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

    pub(super) fn staged(&mut self) -> Result<()> {
        let export = self.ready_tensor()?;
        self.opened_by("staged", &export)?;
        finish(export)
    }

    /// Every `kill_every` rounds the importer is killed while it has the memory open, and another takes its place.
    pub(super) fn killed(&mut self) -> Result<()> {
        let export = self.ready_tensor()?;
        if (self.done + 1).is_multiple_of(self.kill_every) {
            self.opened_by("hold", &export)?;
            self.importer = Partner::start(self.device)?;
        } else {
            self.opened_by("open", &export)?;
        }
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
