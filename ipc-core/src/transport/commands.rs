//! The commands of other threads to the poller's thread, and what wakes it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::service::{ConnectionId, Service, Session};
use super::socket_file::SocketFile;
use super::watch::{Epoll, WAKE, WatchedClient, WatchedSocket};
use crate::model::error::{Error, Result};
use crate::os::ClosedByFork;
use crate::wire::Reply;

/// The commands of other threads to the poller's.
pub(super) struct CommandQueue<S: Service> {
    pub(super) epoll: Arc<Epoll>,
    wake: OwnedFd,
    commands: Mutex<Vec<PollerCommand<S>>>,
    _closed_by_fork: ClosedByFork,
}

pub(super) enum PollerCommand<S: Service> {
    Listen {
        listener: OwnedFd,
        refuses_fds: bool,
        file: Option<SocketFile>,
    },
    Watch(Arc<dyn WatchedClient>, Option<OwnedFd>),
    Unwatch(u64),
    WatchSocket(u64, Arc<dyn WatchedSocket>, Option<OwnedFd>),
    UnwatchSocket(u64),
    Send(Vec<ConnectionId>, Reply),
    Event(ConnectionId, <S::Session as Session>::Event),
    Service(S::Command),
    /// Answers once there is nothing left to handle, with the number of what was handled.
    #[cfg(feature = "kill-points")]
    WhenIdle(std::sync::mpsc::Sender<u64>),
}

impl<S: Service> CommandQueue<S> {
    pub(super) fn new() -> Result<Self> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: Errno| Error::io(what, error)
        };
        let epoll = Epoll::new().map_err(failed("creating an epoll instance"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(failed("creating an eventfd"))?;
        epoll::add(epoll.fd(), &wake, EventData::new_u64(WAKE), EventFlags::IN)
            .map_err(failed("watching an eventfd"))?;
        let _closed_by_fork = ClosedByFork::new(wake.as_fd());
        Ok(Self { epoll: Arc::new(epoll), wake, commands: Mutex::default(), _closed_by_fork })
    }

    /// Takes the commands that have been queued since the last call.
    pub(super) fn take_commands(&self) -> Vec<PollerCommand<S>> {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Queues a command and wakes the poller.
    pub(super) fn push(&self, command: PollerCommand<S>) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // The counter cannot overflow: the poller reads it to zero at every turn.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}
