package rmqstore.interop;

/**
 * Closes a store or a broker in order, without the waits that only give others time: DefaultMessageStore.shutdown()
 * sleeps three seconds so that requests under way may end, and each remoting service waits up to three seconds for an
 * event. Here nothing is under way: every command waits for its answer and for dispatch before it closes. All that a
 * shutdown does is left as it is.
 */
final class QuickClose {
    private static final String STORE = "org.apache.rocketmq.store.DefaultMessageStore";
    private static final String EVENTS = "NettyEventExecutor";

    private QuickClose() {
    }

    /** Runs `close` on this thread and cuts its waits short; returns when it has ended. */
    static void run(Runnable close) throws InterruptedException {
        Thread closing = Thread.currentThread();
        Thread waker = new Thread(() -> {
            try {
                // Nothing but a sleep or a wait for an event is ever interrupted: an interrupted file channel would
                // be closed. The sleep comes once and ends with the first interrupt.
                boolean slept = false;
                while (true) {
                    if (!slept && waitsIn(closing, "sleep", STORE)) {
                        closing.interrupt();
                        slept = true;
                    }
                    if (waitsIn(closing, "join", "ServiceThread")) {
                        for (Thread thread : Thread.getAllStackTraces().keySet()) {
                            if (thread.getName().contains(EVENTS) && waitsIn(thread, "poll", EVENTS)) {
                                thread.interrupt();
                            }
                        }
                    }
                    Thread.sleep(10);
                }
            } catch (InterruptedException e) {
                // The close has ended.
            }
        }, "quick-close");
        waker.setDaemon(true);
        waker.start();
        close.run();
        waker.interrupt();
        waker.join();
        // An interrupt that came as the sleep ended by itself must not reach what follows.
        Thread.interrupted();
    }

    private static boolean waitsIn(Thread thread, String method, String className) {
        StackTraceElement[] stack = thread.getStackTrace();
        for (int i = 0; i + 1 < stack.length; i++) {
            if (stack[i].getMethodName().equals(method)) {
                return stack[i + 1].getClassName().contains(className);
            }
        }
        return false;
    }
}
