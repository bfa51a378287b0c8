//! A process that answers questions, a line each.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// The process; it ends when this is dropped.
pub(super) struct Worker {
    child: Child,
    questions: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts it, and hears what it says of itself.
    /// # Errors
    /// If it cannot be started or says nothing.
    pub(super) fn start(command: &mut Command) -> Result<(Self, Value)> {
        let program = command.get_program().display().to_string();
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| program.clone())?;
        let questions = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        let mut worker = Self { child, questions, answers };
        let about = worker.hear().with_context(|| format!("starting `{program}`"))?;
        Ok((worker, about))
    }

    /// # Errors
    /// If it has ended or answers nonsense.
    pub(super) fn ask(&mut self, question: &str) -> Result<Value> {
        let questions = self.questions.as_mut().context("no pipe")?;
        writeln!(questions, "{question}").with_context(|| question.to_string())?;
        self.hear().with_context(|| question.to_string())
    }

    fn hear(&mut self) -> Result<Value> {
        match self.answers.next() {
            Some(line) => {
                let line = line?;
                serde_json::from_str(&line).with_context(|| line)
            }
            None => bail!("the process ended: {}", self.child.wait()?),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends with its questions.
        self.questions = None;
        let _ = self.child.wait();
    }
}
