use super::*;

#[test]
fn early_completion_counts_after_earlier_sequences() {
    let mut order = CompletionOrder::from(5);
    let completed: Vec<_> = [7, 5, 6, 9, 8].into_iter().map(|sequence| order.complete(sequence)).collect();
    assert_eq!(completed, [5, 6, 8, 8, 10]);
}
