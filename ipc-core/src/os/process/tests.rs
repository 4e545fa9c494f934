use super::*;

#[test]
fn process_with_other_start_time_has_exited() {
    let current = ProcessIdentity::current().unwrap();
    assert_eq!(current.pid, std::process::id());
    assert!(!current.has_exited(&current));
    let reused = ProcessIdentity { start_time: current.start_time + 1, ..current };
    assert!(reused.has_exited(&current));
    let elsewhere = ProcessIdentity { pid_namespace: 0, ..reused };
    assert!(!elsewhere.has_exited(&current));
}

#[test]
fn hashes_of_processes_differ() {
    let current = ProcessIdentity::current().unwrap();
    let state = std::hash::RandomState::new();
    let hash = |one: &ProcessIdentity| std::hash::BuildHasher::hash_one(&state, one);
    assert_eq!(hash(&current), hash(&ProcessIdentity::current().unwrap()));
    assert_ne!(hash(&current), hash(&ProcessIdentity { pid: current.pid + 1, ..current }));
    assert_ne!(hash(&current), hash(&ProcessIdentity { start_time: current.start_time + 1, ..current }));
}

#[test]
fn parentheses_in_program_name_do_not_shift_fields() {
    let fields: Vec<String> = (3..=30).map(|field| field.to_string()).collect();
    let stat = format!("7 (a) b (c)) {}", fields.join(" "));
    assert_eq!(start_time(&stat).unwrap(), 22);
}
