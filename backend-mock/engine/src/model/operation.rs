//! The operations of the engine by name, for counters and for fault injection.

use std::fmt;
use std::str::FromStr;

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A call of [`Machine`](crate::Machine), or the execution of queued work.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Operation { $($(#[$doc])* $variant,)* }

        impl Operation {
            /// All operations.
            pub const ALL: &'static [Operation] = &[$(Operation::$variant,)*];

            /// Returns the name that [`MachineConfig::from_spec`](crate::MachineConfig::from_spec) takes.
            pub const fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name,)* }
            }
        }
    };
}

operations! {
    /// `allocate`
    Allocate = "allocate",
    /// `free`
    Free = "free",
    /// `range_of`
    RangeOf = "range_of",
    /// `memory_info`
    MemoryInfo = "memory_info",
    /// `export_bytes` and `export_fd`
    Export = "export",
    /// `unexport`
    Unexport = "unexport",
    /// `open` and `open_contiguous`
    Open = "open",
    /// `close`
    Close = "close",
    /// `create_stream`, and the first `default_stream` of a device
    CreateStream = "create_stream",
    /// `destroy_stream`
    DestroyStream = "destroy_stream",
    /// `synchronize`, `synchronize_timeout` and `synchronize_device`
    Synchronize = "synchronize",
    /// `query`
    Query = "query",
    /// `copy`
    Copy = "copy",
    /// `fill`
    Fill = "fill",
    /// `write_from_host`
    Write = "write",
    /// `read_to_host` and `read_then`
    Read = "read",
    /// `add_f32` and `add_u8`
    Kernel = "kernel",
    /// `host_fn`
    HostFn = "host_fn",
    /// `write_value64`
    WriteValue = "write_value",
    /// `wait_value64`
    WaitValue = "wait_value",
    /// `create_event`
    CreateEvent = "create_event",
    /// `export_event`
    ExportEvent = "export_event",
    /// `open_event`
    OpenEvent = "open_event",
    /// `destroy_event`
    DestroyEvent = "destroy_event",
    /// `record`
    Record = "record",
    /// `wait`
    Wait = "wait",
    /// `query_event`
    QueryEvent = "query_event",
    /// `synchronize_event`
    SynchronizeEvent = "synchronize_event",
    /// `create_block` and `create_sparse_block`
    CreateBlock = "create_block",
    /// `release_block`
    ReleaseBlock = "release_block",
    /// `export_block_fd` and `export_block_number`
    ExportBlock = "export_block",
    /// `import_block_fd` and `import_block_number`
    ImportBlock = "import_block",
    /// `import_memory`
    ImportMemory = "import_memory",
    /// `reserve`
    Reserve = "reserve",
    /// `unreserve`
    Unreserve = "unreserve",
    /// `map_block`
    MapBlock = "map_block",
    /// `unmap_blocks`
    UnmapBlocks = "unmap_blocks",
    /// `set_access` and `grant_access`
    SetAccess = "set_access",
    /// `register_host`
    RegisterHost = "register_host",
    /// `unregister_host`
    UnregisterHost = "unregister_host",
    /// The execution of one queued operation on a stream's thread. A fault fails the stream, not the call.
    Run = "run",
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Operation {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.iter().copied().find(|operation| operation.name() == text).ok_or(())
    }
}

/// A fault: one call that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The operation that fails.
    pub operation: Operation,
    /// The nth call after the fault was armed fails, once; 1 is the next call.
    pub after: u32,
    /// The code of the resulting [`EngineError::Injected`](crate::EngineError::Injected).
    pub code: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_parse_back() {
        for (index, &operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(operation as usize, index);
            assert_eq!(operation.name().parse(), Ok(operation));
        }
        assert_eq!("warp".parse::<Operation>(), Err(()));
    }
}
