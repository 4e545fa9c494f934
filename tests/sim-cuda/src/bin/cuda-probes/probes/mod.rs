//! The probes in the order of the output.

mod capture;
mod context;
mod events;
mod exporting;
mod memory;
mod namespaces;
mod opening;
mod pools;
mod streams;
mod virtual_memory;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use crate::driver::{Driver, R};
use crate::other::Other;

/// The environment of a probe.
pub(crate) struct Probe<'a> {
    pub(crate) driver: &'a Driver,
    pub(crate) library: &'a Path,
}

/// A probe: returns its finding, or an unexpected status.
type Run = fn(&Probe<'_>) -> R<String>;

/// 64 MiB: the size of a block with separate pages.
const LARGE: usize = 64 << 20;
/// 4 KiB: the size of a block that shares its page.
const SMALL: usize = 4096;
/// 2 MiB: the granularity of virtual memory.
const PAGE: usize = 2 << 20;

/// The time after which a call counts as waiting.
const BLOCKED: Duration = Duration::from_millis(700);

impl Probe<'_> {
    fn other(&self) -> R<Other> {
        Other::start(self.library)
    }

    /// Checks that there are two devices.
    fn two_devices(&self) -> R {
        if self.driver.devices()? > 1 { Ok(()) } else { Err("skipped: one device".to_owned()) }
    }

    /// Returns a stream that waits for a word in host memory, and the word.
    fn busy_stream(&self) -> R<(u64, Word)> {
        let word = Word(self.driver.alloc_host(SMALL)?);
        word.set(0);
        let stream = self.driver.stream()?;
        self.driver.stream_wait_value(stream, word.0, 1, 0)?;
        Ok((stream, word))
    }

    /// Returns whether a call waits for a stream that is blocked meanwhile.
    fn waits(&self, context: u64, word: Word, call: impl FnOnce(&Driver) -> R + Send) -> R<String> {
        self.waits_and_holds_up(context, word, call, None)
    }

    /// Returns whether a call waits for a stream that is blocked meanwhile, and whether another concurrent call
    /// waits for that one.
    fn waits_and_holds_up(
        &self,
        context: u64,
        word: Word,
        call: impl FnOnce(&Driver) -> R + Send,
        meanwhile: Option<fn(&Driver) -> R>,
    ) -> R<String> {
        let driver = self.driver;
        std::thread::scope(|scope| {
            let (send, first) = mpsc::channel();
            scope.spawn(move || drop(send.send(driver.ctx_push(context).and_then(|()| call(driver)))));
            let at_once = first.recv_timeout(BLOCKED);
            let second = meanwhile.map(|call| {
                let (send, second) = mpsc::channel();
                scope.spawn(move || drop(send.send(driver.ctx_push(context).and_then(|()| call(driver)))));
                let returned = second.recv_timeout(BLOCKED).is_ok();
                (second, returned)
            });
            // Not by the driver, whose calls may wait too.
            word.set(1);
            let mut said = match at_once {
                Ok(result) => format!("returns at once: {}", status(result)),
                Err(_) => {
                    let later = first.recv_timeout(Duration::from_secs(20));
                    format!("waits for the stream: {}", later.map_or("and does not end".to_owned(), status))
                }
            };
            if let Some((second, returned)) = second {
                let how = if returned { "returns at once" } else { "waits for it" };
                let ended = returned || second.recv_timeout(Duration::from_secs(20)).is_ok();
                said = format!("{said}, another call {how}{}", if ended { "" } else { " and does not end" });
            }
            Ok(said)
        })
    }
}

/// A word in page-locked host memory.
#[derive(Clone, Copy)]
struct Word(u64);

impl Word {
    /// Sets the word by the program, without the driver.
    fn set(self, value: u64) {
        let word = self.0 as *mut u64;
        // SAFETY: host memory that the driver has allocated, aligned, and only accessed as a whole word.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(word) }
            .store(value, std::sync::atomic::Ordering::Release);
    }
}

/// Returns the text of a status.
fn status<T>(result: R<T>) -> String {
    result.map_or_else(|status| status, |_| "success".to_owned())
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

macro_rules! probes {
    ($($module:ident: $($name:ident)*;)*) => {
        /// All probes by name.
        pub(crate) const ALL: &[(&str, Run)] = &[$($((concat!(stringify!($module), "::", stringify!($name)), $module::$name),)*)*];
    };
}

probes! {
    context:
        call_before_init init_with_flags call_without_context ordinal_out_of_range name_of_an_unknown_status
        address_of_a_function address_of_no_function primary_context_is_one pop_without_one destroy_a_primary_one
        state_after_reset memory_after_reset call_after_reset opened_memory_after_reset memory_of_a_destroyed_one
        peer_access_to_oneself peer_memory_without_access peer_memory_with_access release_too_often identity_after_reset ordinary_event_after_reset shared_event_after_reset query_ordinary_event_after_reset
        query_shared_event_after_reset destroy_ordinary_event_after_reset destroy_shared_event_after_reset attribute_after_reset;
    memory:
        allocate_nothing free_null free_inside free_twice new_block_takes_the_freed_place buffer_id_is_new
        small_blocks_are_neighbours range_of_an_interior_address range_of_no_memory attributes_of_plain_memory
        attributes_of_host_memory attributes_of_no_memory attributes_in_one_call_of_no_memory attributes_that_no_memory_leaves_alone copy_past_the_end
        copy_across_neighbours fill_misaligned kernel_across_neighbours kernel_on_no_memory call_after_such_a_kernel
        free_while_a_stream_waits allocate_while_a_stream_waits free_host_memory_while_a_stream_waits
        register_twice unregister_nothing device_address_of_registered_memory unregister_while_a_stream_waits free_holds_up_others synchronize_holds_up_nobody module_of_nonsense;
    exporting:
        inside_gives_the_bytes_of_the_base handle_of_the_next_block host_memory pool_memory virtual_memory freed_memory
        opened_memory;
    opening:
        reads_and_is_read zeros corrupt corrupt_wholly bytes_that_are_ignored in_the_exporter freed stale_with_a_private_successor
        stale_with_an_exported_successor stale_while_the_old_block_is_open twice_in_one_context closes_are_counted
        in_two_contexts in_the_second_context_alone close_in_another_context
        read_after_close_in_another_context close_on_another_device close_inside close_own_memory without_the_lazy_flag
        with_an_unknown_flag survives_the_exporters_free survives_the_exporters_death after_the_exporters_death
        range_is_the_block attributes retain_its_handle free_it copy_past_its_end kernel_reads_the_neighbour
        close_while_a_stream_waits on_another_device;
    events:
        with_timing export_of_an_ordinary_one open_own open_zeros open_destroyed open_after_the_exporters_death
        query_of_a_destroyed_one query_after_the_exporters_death destroyed_while_pending dead_while_pending
        destroyed_with_a_successor export_an_opened_one never_recorded record_on_another_context waits_for_the_exporter
        record_is_seen_by_the_exporter ordinary_one_on_another_device shared_one_on_another_device shared_one_in_another_context;
    namespaces:
        memory_with_its_own_shm event_with_its_own_shm no_proc memory_with_another_pid event_with_another_pid
        memory_with_the_same_pid event_with_the_same_pid virtual_memory_with_the_same_pid;
    virtual_memory:
        granularity odd_size reserve_at_an_address no_access read_only_fill read_only_read read_only_kernel call_after_such_a_kernel
        map_where_something_is unmap_a_part free_addresses_in_use release_keeps_the_mapping attributes range_of_two_mappings range_without_access map_a_part_of_a_block import_a_pool unmap_while_a_stream_waits
        retain_is_the_same_handle export_without_being_asked_for import_by_value import_by_pointer
        import_of_something_else import_own survives_the_exporters_death export_an_imported_one fabric fabric_of_another_process fabric_of_nonsense;
    pools:
        export_the_default_pool export_a_pointer_first import_and_read read_only attributes
        attributes_of_an_imported_pointer free_an_imported_pointer import_a_pointer_twice import_a_freed_pointer
        read_a_freed_pointer freed_pointer_with_a_successor
        allocate_from_an_imported_pool current_pool_is_used take_access_from_its_own_device export_an_interior_pointer import_the_pool_twice import_physical_memory destroy_an_imported_pool free_while_a_stream_waits blocks_are_neighbours free_async_of_plain_memory;
    streams:
        word_is_written_and_awaited wait_is_cyclic word_misaligned word_in_no_memory word_in_registered_memory
        large_value_frees_a_waiting_stream word_of_another_process query_busy destroyed_with_work_left context_of;
    capture:
        synchronize_ends_it allocate_ends_it allocate_when_relaxed nothing_wrong states wait_for_an_outside_event
        record_a_shared_event write_a_word query_an_event query_a_captured_event wait_for_one_never_recorded synchronize_the_context_when_relaxed state_of_the_default_stream open_memory close_memory open_an_event;
}
