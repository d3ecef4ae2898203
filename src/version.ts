/** The release. A test checks that package.json agrees. */
export const VERSION = '0.1.0'
